"""The queue of requests that wait for admission, and when each request must be looked at.

Within a priority, requests that have begun and lost their place go first, by their rank; then
those that have not begun, in the order of `fairness`.

Requests that have left are not searched for in a heap: their entries are skipped, and swept
out when they outnumber the living.
"""

import heapq
from collections.abc import Iterator, Mapping

from tidegate.ipc.protocol import RequestId
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.fairness import STALE_COUNT_MIN, FairShares, weight_of
from tidegate.scheduler.state import Rank, Request


class Load:
    """How much waits: requests, and tokens of their prompts."""

    def __init__(self) -> None:
        self.count = 0
        self.prompt_tokens = 0

    def add(self, request: Request, sign: int) -> None:
        self.count += sign
        self.prompt_tokens += sign * request.lengths.prompt


class WaitingQueue:
    """Requests in the order in which they are to be admitted.

    `loads` has an entry for each tenant with requests that wait.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.shares = FairShares(weights)
        self.load = Load()
        self.loads: dict[str, Load] = {}
        self._weights = weights
        self._weight = 0.0  # Of all tenants with requests that wait.
        self._resumed: list[tuple[Rank, RequestId]] = []
        self._waiting: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order of their arrival."""
        return iter(tuple(self._waiting.values()))

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._waiting

    def add(self, request: Request) -> None:
        """A new request, or one that has lost its place; what it will compute is refunded."""
        account, name = request.account, request.request_id
        if account.has_begun:
            self.shares.give_way(account, request.output_count)
            heapq.heappush(self._resumed, (request.rank, name))
        else:
            self.shares.wait(account, name, request.number)
        self._waiting[name] = request
        self._note_load(request, 1)

    def begin(self, request: Request, computed: Tokens) -> None:
        """The request leaves the queue, and is charged for `computed` prompt positions."""
        account = request.account
        if account.has_begun:
            self.shares.begin_anew(account, computed, request.output_count)
        else:
            self.shares.begin(account, request.request_id, computed)
        self._remove(request)

    def leave(self, request: Request) -> None:
        """The request leaves the queue without being served."""
        if not request.account.has_begun:
            self.shares.leave(request.account, request.request_id)
        self._remove(request)

    def head(self) -> Request | None:
        """The request that is admitted next."""
        while self._resumed and self._resumed[0][1] not in self._waiting:
            heapq.heappop(self._resumed)
        first = self.shares.first()
        if self._resumed:
            (negated, _), name = self._resumed[0]
            if first is None or -negated >= first[0]:
                return self._waiting[name]
        return None if first is None else self._waiting[first[1]]

    def behind(self, limit: int) -> list[Request]:
        """Up to `limit` requests of the head's priority that come after it.

        The head must be one that has not begun.
        """
        return [self._waiting[name] for name in self.shares.behind(limit)]

    def share(self, tenant: str) -> float:
        """What part of the service a tenant with requests that wait has, by its weight."""
        return weight_of(self._weights, tenant) / self._weight

    def places(self) -> dict[RequestId, int]:
        """How many requests go before each one, if no other comes and no token is sampled."""
        keys: list[tuple[int, int, float, int, RequestId]] = []
        for name, request in self._waiting.items():
            if request.account.has_begun:
                keys.append((*request.rank[:1], 0, 0.0, request.rank[1], name))
        for line in self.shares.lines():
            clock = line.clock
            for name, number in line.waiting.items():
                keys.append((-line.priority, 1, clock, number, name))
                clock += self._waiting[name].lengths.prompt / line.weight
        return {key[-1]: place for place, key in enumerate(sorted(keys))}

    def check(self) -> None:
        """Assert that the order has all that wait, and the loads count them."""
        self.shares.check()
        fresh = {r.request_id for r in self if not r.account.has_begun}
        assert fresh == {name for line in self.shares.lines() for name in line.waiting}
        resumed = {r.request_id for r in self if r.account.has_begun}
        assert resumed <= {name for _, name in self._resumed}
        for tenant, load in [*self.loads.items(), (None, self.load)]:
            mine = [r for r in self if tenant in (None, r.tenant)]
            tokens = sum(r.lengths.prompt for r in mine)
            assert (load.count, load.prompt_tokens) == (len(mine), tokens)

    def _remove(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._note_load(request, -1)
        if len(self._resumed) > 2 * len(self._waiting) + STALE_COUNT_MIN:
            self._resumed = [
                (r.rank, r.request_id) for r in self._waiting.values() if r.account.has_begun
            ]
            heapq.heapify(self._resumed)

    def _note_load(self, request: Request, sign: int) -> None:
        self.load.add(request, sign)
        tenant = request.tenant
        load = self.loads.get(tenant)
        if load is None:
            load = self.loads[tenant] = Load()
            self._weight += weight_of(self._weights, tenant)
        load.add(request, sign)
        if not load.count:
            del self.loads[tenant]
            self._weight -= weight_of(self._weights, tenant)
        if not self.loads:
            self._weight = 0.0  # Sums of fractions leave crumbs.


class Timers:
    """One timer for each request: it is looked at by then at the latest."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, RequestId]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_us(self) -> int | None:
        """No request need be looked at before this time."""
        return self._heap[0][0] if self._heap else None

    def watch(self, request: Request, due_us: int) -> None:
        """Look at the request at `due_us`, or earlier if that was asked for before."""
        if request.timer_us is None or due_us < request.timer_us:
            request.timer_us = due_us
            heapq.heappush(self._heap, (due_us, request.request_id))

    def take_due(self, requests: dict[RequestId, Request], now_us: int) -> list[Request]:
        """The living requests whose time has come. Each must be watched anew, or end."""
        due: list[Request] = []
        while self._heap and self._heap[0][0] <= now_us:
            time_us, request_id = heapq.heappop(self._heap)
            request = requests.get(request_id)
            if request is not None and request.timer_us == time_us:
                request.timer_us = None
                due.append(request)
        if len(self._heap) > 2 * len(requests) + STALE_COUNT_MIN:
            self._heap = [
                (request.timer_us, request.request_id)
                for request in requests.values()
                if request.timer_us is not None
            ]
            heapq.heapify(self._heap)
        return due
