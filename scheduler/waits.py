"""Why a request waits: the one explanation behind the answer to `WhyWaiting` and the log.

1. `open_choices` and `target_choice` say where a request may go now; placement tries them, and
   so the explanation of why it could not cannot differ from what was tried.
2. A `Cause` names what is lacking. It is cheap: every plan finds that of the head of the queue.
3. `describe` adds who has the pages, and a sentence. That is done for a cause that is new, and
   for a client that asks.

Nothing here changes the state.
"""

from collections.abc import Sequence
from heapq import nsmallest

import msgspec

from tidegate.ipc.protocol import PageHolder, RequestId, Role, Waiting, WaitKind
from tidegate.kvcache.demand import Leg
from tidegate.kvcache.layout import Pages, Tokens
from tidegate.scheduler.deadlines import in_time
from tidegate.scheduler.door import Choice, admission_choices, holding, of_role
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.state import Request, Seat, Worker
from tidegate.scheduler.wait_text import wait_text

HOLDER_COUNT_MAX = 8  # Requests that an answer or a log line names; the others are counted.


class Cause(msgspec.Struct, frozen=True):
    """What a request lacks. `group` is the pool of `worker` that lacks `short` pages.

    `ahead` are served before it, and `first` is the first of them.
    """

    kind: WaitKind
    worker: Worker | None = None
    group: int | None = None
    short: Pages = Pages(0)
    ahead: int = 0
    first: Request | None = None

    @property
    def pool(self) -> str:
        if self.worker is None or self.group is None:
            return ""
        return self.worker.layout.groups[self.group].name

    @property
    def key(self) -> str:
        """Two causes of one key are the same to whoever waits.

        Another worker of the role is no change: which one is the roomiest may be another in
        each plan.
        """
        role = "" if self.worker is None else self.worker.role.value
        return f"{self.kind.value} {role} {self.pool}"


# --- Where a request may go now ---


def open_choices(fleet: Fleet, request: Request) -> list[Choice]:
    """Where a request of the queue may begin, in order of preference.

    Nowhere where it would be handed off, while too many finished prompts have no destination.
    """
    choices = admission_choices(fleet.healthy(), request)
    if len(fleet.awaiting_target) >= fleet.settings.handoff_waiting_count_max:
        choices = [choice for choice in choices if choice.leg is not Leg.SOURCE]
    return choices


def target_choice(fleet: Fleet, request: Request) -> Choice:
    """The decode workers that a finished prompt may be handed over to."""
    assert request.source is not None
    lengths = request.source.lengths
    targets = holding(of_role(fleet.healthy(), Role.DECODE), Leg.TARGET, lengths)
    return Choice(Leg.TARGET, lengths, tuple(targets))


# --- Causes ---


def cause_at_door(fleet: Fleet, request: Request, choices: Sequence[Choice]) -> Cause:
    """Why the first of a queue has no place on the roomiest worker of its first choice."""
    choice = next((choice for choice in choices if choice.workers), None)
    if choice is None:
        ahead = fleet.awaiting_target
        return Cause(WaitKind.DESTINATION, ahead=len(ahead), first=ahead[0] if ahead else None)
    worker = max(choice.workers, key=lambda w: w.books.available(0))
    if not worker.rows_free:
        return Cause(WaitKind.ROW, worker)
    hit = fleet.find_hit(request, worker, choice.leg)
    short = fleet.shortage_now(worker, choice.leg, choice.lengths, hit)
    if short is None:
        return Cause(WaitKind.TURN)  # There is room: it is placed by the next plan.
    return _short_of(worker, *short)


def cause_of_starving(seat: Seat) -> Cause:
    """Why a decoding row that has no page for its next position gets none."""
    tables = seat.holding.tables
    group = min(range(len(tables)), key=lambda index: tables[index].covered)
    return _short_of(seat.worker, group, tables[group].missing(Tokens(seat.settled + 1)))


def _short_of(worker: Worker, group: int, short: Pages) -> Cause:
    are_coming = worker.books.pools[group].draining_count >= short
    kind = WaitKind.DRAINING if are_coming else WaitKind.PAGES
    return Cause(kind, worker, group, short)


class Explainer:
    """Explains why requests wait, as things stand. For use until the state changes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._found: dict[RequestId, Waiting] = {}
        self._places: dict[RequestId, int] | None = None  # In the queue.

    def explain(self, request: Request) -> Waiting:
        """What a living request waits for. A worker's answer, if it waits for nothing else."""
        found = self._found.get(request.request_id)
        if found is None:
            cause = self._cause(request)
            # What keeps the first one waiting keeps the others, too.
            is_turn = cause.kind in (WaitKind.TURN, WaitKind.DESTINATION)
            first = self.explain(cause.first).text if is_turn and cause.first else ""
            found = self._found[request.request_id] = describe(request, cause, first)
        return found

    def _cause(self, request: Request) -> Cause:
        fleet = self._fleet
        match request.phase:
            case Phase.WAITING:
                head = fleet.waiting.head()
                if head is not request:
                    return Cause(WaitKind.TURN, ahead=self._place(request), first=head)
                choices = open_choices(fleet, request)
                return cause_at_door(
                    fleet, request, in_time(fleet, request, choices, fleet.planned_us)
                )
            case Phase.HANDING_OFF if request.target is None:
                place = fleet.awaiting_target.index(request)
                if place > 0:
                    return Cause(WaitKind.TURN, ahead=place, first=fleet.awaiting_target[0])
                return cause_at_door(fleet, request, [target_choice(fleet, request)])
            case _:
                return _cause_on_worker(request)

    def _place(self, request: Request) -> int:
        """How many requests of the queue go before this one."""
        if self._places is None:
            self._places = self._fleet.waiting.places()
        return self._places[request.request_id]


def _cause_on_worker(request: Request) -> Cause:
    """What a request with a place of its own waits for."""
    seat = request.source if request.target is None else request.target
    assert seat is not None
    if request.phase is Phase.DECODING and request.is_held:
        return Cause(WaitKind.READER, seat.worker)
    if request.phase is Phase.DECODING and seat.is_starving and not seat.is_ended:
        return cause_of_starving(seat)
    prompts = seat.worker.prefilling
    if seat.chunk_until is None and seat in prompts:
        # Those of the launch under way go first, whatever their rank.
        place = prompts.index(seat)
        launched = [other for other in prompts if other.chunk_until is not None]
        before = launched + [other for other in prompts[:place] if other.chunk_until is None]
        first = before[0].request if before else None
        return Cause(WaitKind.TURN, seat.worker, ahead=len(before), first=first)
    return Cause(WaitKind.ANSWER, seat.worker)


# --- The whole answer ---


def describe(request: Request, cause: Cause, first: str = "") -> Waiting:
    """The cause with the pool's state and its holders. `first` is the text of `cause.first`.

    The answer has the scheduler's own name of the request.
    """
    worker = cause.worker
    found = Waiting(
        request.request_id,
        request.phase,
        cause.kind,
        text="",
        ahead=cause.ahead,
        first=None if cause.first is None else cause.first.request_id,
        role=None if worker is None else worker.role,
        worker=None if worker is None else worker.worker_id,
        passed=0 if request.account.has_begun else request.passed_count,
    )
    if worker is not None and cause.group is not None:
        pool, available = worker.books.pools[cause.group], worker.books.available(cause.group)
        holders = _holders(worker, cause.group)
        found = msgspec.structs.replace(
            found,
            pool=cause.pool,
            pages_short=cause.short,
            pages_needed=available + cause.short,
            pages_available=available,
            pages_draining=pool.draining_count,
            pages_cached=pool.idle_count,
            holders=tuple(nsmallest(HOLDER_COUNT_MAX, holders, key=_largest_first)),
            holders_left_out=max(0, len(holders) - HOLDER_COUNT_MAX),
        )
    return msgspec.structs.replace(found, text=wait_text(found, request, worker, first))


def _holders(worker: Worker, group: int) -> list[PageHolder]:
    holders = [
        PageHolder(
            seat.request.request_id,
            seat.holding.tables[group].page_count + seat.holding.promised(group),
        )
        for seat in worker.seats.values()
    ]
    return [holder for holder in holders if holder.page_count]


def _largest_first(holder: PageHolder) -> tuple[int, RequestId]:
    return -holder.page_count, holder.request_id
