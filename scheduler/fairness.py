"""Fair shares between tenants: who of those that have not begun is served next.

1. The highest priority goes first. Within a priority each tenant has a *line*, in which its
   requests wait in the order of their arrival.
2. A line has a *clock*: what its requests were charged, divided by the tenant's weight. The
   first request of the line whose clock is behind all others is next; of two lines with the
   same clock, the one whose first request came earlier.
3. A request is charged for its prompt's computed positions when it begins, and for each token
   that is sampled. When it gives way, what it will have to compute again is refunded. When it
   begins anew it is charged that, or what it computes now if that is more: so in all each
   position is paid for once, however often it was computed.
4. A line saves up no credit while it is empty. When a request joins it, its clock is put
   forward to that of the line which is next, or if none waits, to what that was when the last
   request began.

So of two lines in which requests wait, the one that is served is not ahead of the other. After
that it may be charged for what it has begun, and for nothing else: `docs/FAIRNESS.md` derives
from it how far two tenants can differ.

No step looks at all lines, or at all requests of one. Clocks that have moved on are found out
at the top of a heap, once for each time that a line is charged.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain, count, islice, zip_longest

from tidegate.ipc.protocol import RequestId

DECODE_COST = 4  # What a sampled token is charged; a computed position of a prompt is 1.
WEIGHT_DEFAULT = 1.0
# Empty lines whose clocks are ahead, and remembered. Beyond that the oldest is forgotten, and
# with it what it was ahead.
IDLE_LINE_COUNT_MAX = 1024
STALE_COUNT_MIN = 64  # So many dead entries of a heap are never worth a sweep.

Key = tuple[float, int]  # A line's clock, and the number of its first request.


def weight_of(weights: Mapping[str, float], tenant: str) -> float:
    return weights.get(tenant, WEIGHT_DEFAULT)


class Line:
    """One tenant's requests of one priority. `waiting` has their numbers, in order."""

    def __init__(self, priority: int, tenant: str, weight: float) -> None:
        self.priority = priority
        self.tenant = tenant
        self.weight = weight
        self.clock = 0.0
        self.waiting: OrderedDict[RequestId, int] = OrderedDict()
        self.begun_count = 0  # Requests that have begun and not ended.
        self.entry: Key | None = None  # Where its class's heap has it.

    @property
    def key(self) -> Key:
        return self.clock, next(iter(self.waiting.values()))

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.begun_count


class Account:
    """What one request is charged, and to which line."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.charged = 0
        self.has_begun = False
        self.output_count = 0  # Tokens that have been charged.
        self._refundable = 0  # What it would compute again, but for the tokens since it began.
        self._output_at_begin = 0
        self._refunded = 0  # While it waits to begin anew.

    def pay(self, tokens: int) -> None:
        self.charged += tokens
        self.line.clock += tokens / self.line.weight

    def settle(self, output_count: int) -> None:
        """Pay for the tokens that have been sampled since the last call."""
        self.pay(DECODE_COST * (output_count - self.output_count))
        self.output_count = output_count

    def begin(self, computed: int, output_count: int) -> None:
        paid = max(computed, self._refunded)
        self.pay(paid)
        self.has_begun = True
        self._refundable, self._output_at_begin, self._refunded = paid, output_count, 0

    def refund(self) -> None:
        """Get back what has to be computed again. The tokens must be settled."""
        self._refunded = self._refundable + self.output_count - self._output_at_begin
        self.pay(-self._refunded)

    def close(self, uncomputed: int) -> None:
        """Pay for what was refunded and will not be computed again, or get back what was paid
        and will not be computed at all."""
        self.pay(self._refunded - uncomputed)


class _Class:
    """The lines of one priority."""

    def __init__(self, ticks: Iterator[int]) -> None:
        self.lines: dict[str, Line] = {}
        self.reached = 0.0  # The clock that was the least when the last request began.
        self._heap: list[tuple[Key, int, Line]] = []
        self._ticks = ticks  # Tells apart entries of the same key.

    def touch(self, line: Line) -> None:
        """The line has a new request, or its clock was put back."""
        if line.waiting and (line.entry is None or line.key < line.entry):
            self._push(line)

    def first(self) -> Line | None:
        """The line that is served next."""
        while self._heap:
            key, _, line = self._heap[0]
            if key == line.entry and line.waiting and key == line.key:
                return line
            heapq.heappop(self._heap)
            if key == line.entry:
                line.entry = None
                if line.waiting:
                    self._push(line)
        return None

    @property
    def entry_clock(self) -> float:
        """To what an empty line that is behind is put forward when a request joins it."""
        first = self.first()
        return self.reached if first is None else first.clock

    def first_lines(self, limit: int) -> list[Line]:
        """Up to `limit` lines in the order in which they would be served."""
        found: list[Line] = []
        while len(found) < limit and (line := self.first()) is not None:
            heapq.heappop(self._heap)
            line.entry = None
            found.append(line)
        for line in found:
            self._push(line)
        return found

    def _push(self, line: Line) -> None:
        if len(self._heap) > 2 * len(self.lines) + STALE_COUNT_MIN:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].entry]
            heapq.heapify(self._heap)
        line.entry = line.key
        heapq.heappush(self._heap, (line.entry, next(self._ticks), line))


class FairShares:
    """Requests that have not begun, by name and number. Numbers rise with their arrival.

    `weights` are those of tenants; one that is not named has `WEIGHT_DEFAULT`.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._classes: dict[int, _Class] = {}
        # A heap of those with requests, negated. Those without are found out at its top.
        self._priorities: list[int] = []
        self._listed: set[int] = set()  # What the heap has; asked for members only.
        self._idle: OrderedDict[tuple[int, str], Line] = OrderedDict()
        self._ticks = count()

    # --- A request's life ---

    def open(self, priority: int, tenant: str) -> Account:
        """The account of a request, which `wait` must follow."""
        lines = self._class(priority).lines
        line = lines.get(tenant)
        if line is None:
            line = lines[tenant] = Line(priority, tenant, weight_of(self._weights, tenant))
        return Account(line)

    def wait(self, account: Account, request_id: RequestId, number: int) -> None:
        line = account.line
        lines = self._class(line.priority)
        if not line.waiting:
            line.clock = max(line.clock, lines.entry_clock)
            self._idle.pop((line.priority, line.tenant), None)
        line.waiting[request_id] = number
        lines.touch(line)
        self._list(line.priority)

    def leave(self, account: Account, request_id: RequestId) -> None:
        """A request that has not begun waits no more."""
        del account.line.waiting[request_id]
        self._note_idle(account.line)

    def begin(self, account: Account, request_id: RequestId, computed: int) -> None:
        """A request that waits begins, with `computed` positions of its prompt to run."""
        line = account.line
        lines = self._class(line.priority)
        first = lines.first()
        assert first is not None, "a request begins that does not wait"
        lines.reached = max(lines.reached, first.clock)
        del line.waiting[request_id]
        line.begun_count += 1
        account.begin(computed, output_count=0)

    def give_way(self, account: Account, output_count: int) -> None:
        """A request that has begun lost its place, and will begin anew."""
        account.settle(output_count)
        account.refund()
        self._class(account.line.priority).touch(account.line)

    def begin_anew(self, account: Account, computed: int, output_count: int) -> None:
        account.begin(computed, output_count)

    def end(self, account: Account, output_count: int, uncomputed: int) -> None:
        """A request that has begun is over; `uncomputed` positions of its prompt never ran."""
        account.settle(output_count)
        account.close(uncomputed)
        line = account.line
        line.begun_count -= 1
        self._class(line.priority).touch(line)
        self._note_idle(line)

    # --- Order ---

    def first(self) -> tuple[int, RequestId] | None:
        """The request that begins next, with its priority."""
        while self._priorities:
            priority = -self._priorities[0]
            lines = self._classes.get(priority)
            line = None if lines is None else lines.first()
            if line is not None:
                return priority, next(iter(line.waiting))
            self._listed.remove(heapq.heappop(self._priorities))
        return None

    def behind(self, limit: int) -> list[RequestId]:
        """Up to `limit` requests that come after the first, of its priority.

        First those that are at the head of another line, then each line's second, and so on.
        """
        first = self.first()
        if first is None:
            return []
        lines = self._class(first[0]).first_lines(limit + 1)
        ranks = zip_longest(*(list(islice(line.waiting, limit + 1)) for line in lines))
        requests = (request for request in chain.from_iterable(ranks) if request is not None)
        return list(islice(requests, 1, limit + 1))

    def lines(self) -> Iterator[Line]:
        """All lines in which requests wait, in no order that means anything."""
        for lines in self._classes.values():
            yield from (line for line in lines.lines.values() if line.waiting)

    def check(self) -> None:
        """Assert that the heaps find every line, and that no empty one is kept for nothing."""
        for priority, lines in self._classes.items():
            waiting = [line for line in lines.lines.values() if line.waiting]
            assert lines.first() is min(waiting, key=lambda line: line.key, default=None)
            assert not waiting or -priority in self._listed
            for line in lines.lines.values():
                is_kept = (priority, line.tenant) in self._idle
                assert is_kept == line.is_idle, "an idle line is not remembered as one"
        assert len(self._idle) <= IDLE_LINE_COUNT_MAX
        assert sorted(self._priorities) == sorted(self._listed)

    def _class(self, priority: int) -> _Class:
        lines = self._classes.get(priority)
        if lines is None:
            lines = self._classes[priority] = _Class(self._ticks)
        return lines

    def _list(self, priority: int) -> None:
        if -priority in self._listed:
            return
        if len(self._priorities) > 2 * len(self._classes) + STALE_COUNT_MIN:
            self._priorities = [
                -other for other, lines in self._classes.items() if lines.first() is not None
            ]
            heapq.heapify(self._priorities)
            self._listed = set(self._priorities)
        if -priority not in self._listed:
            self._listed.add(-priority)
            heapq.heappush(self._priorities, -priority)

    def _note_idle(self, line: Line) -> None:
        if not line.is_idle:
            return
        self._idle[line.priority, line.tenant] = line
        if line.clock <= self._classes[line.priority].entry_clock:
            self._forget(line)  # A new line would begin with a clock that is not behind.
        elif len(self._idle) > IDLE_LINE_COUNT_MAX:
            self._forget(next(iter(self._idle.values())))

    def _forget(self, line: Line) -> None:
        del self._idle[line.priority, line.tenant]
        lines = self._classes[line.priority]
        del lines.lines[line.tenant]
        if not lines.lines:
            del self._classes[line.priority]
