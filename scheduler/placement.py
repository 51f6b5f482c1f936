"""Placement: which worker a request gets, for its prompt and then for its tokens.

The order of holding is the same for all: prefill pages, then decode pages. Both queues are
served from the head while it fits. Of those that wait to begin a few may pass a head that waits
for pages; see `bypass`.
"""

from collections.abc import Iterable

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import WaitKind, WorkerId
from tidegate.kvcache.demand import Leg
from tidegate.kvcache.layout import All
from tidegate.scheduler import bypass, early
from tidegate.scheduler.commands import StartRow
from tidegate.scheduler.deadlines import end_late_head, in_time, restart
from tidegate.scheduler.door import Choice
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.growth import page_runs
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.pulls import start_last_pull
from tidegate.scheduler.run_ahead import least_lead
from tidegate.scheduler.state import Request, Seat, Worker
from tidegate.scheduler.surplus import ask_back, is_asked, reclaim_all
from tidegate.scheduler.wait_records import note_first
from tidegate.scheduler.waits import Cause, cause_at_door, open_choices, target_choice


def assign_targets(fleet: Fleet, now_us: int) -> None:
    """Give finished prompts a destination by rank; the first that must wait ends it.

    What is held early goes before anybody waits, or is asked for what it holds ahead.
    """
    while fleet.awaiting_target:
        request = fleet.awaiting_target[0]
        seat = early.promote(fleet, request)
        if seat is None:
            choice = target_choice(fleet, request)
            seat = _sit_on_roomiest(fleet, request, choice)
            if seat is None:
                if early.take_back_for(fleet, [choice]):
                    continue
                cause = cause_at_door(fleet, request, [choice])
                if _frees_old_pages(cause):
                    continue
                early.give_up_waiting(fleet)
                note_first(fleet, request, cause)
                if cause.kind is WaitKind.PAGES:
                    _ask_back(fleet, cause)
                return
        _begin_handoff(fleet, request, seat, now_us)


def _begin_handoff(fleet: Fleet, request: Request, target: Seat, now_us: int) -> None:
    """The request has its destination, where pages may be already or on their way."""
    fleet.awaiting_target.remove(request)
    request.target = target
    request.waits_for = ""
    request.workers["decode"] = target.worker.worker_id
    source = request.source
    assert source is not None
    fleet.record(
        LogEvent.HANDOFF_STARTED,
        request,
        source=source.worker.worker_id,
        target=target.worker.worker_id,
        length=target.lengths.prompt,
        early_tokens=target.pulled.asked_until,
    )
    if request.ticket is None:
        start_last_pull(fleet, request, target)
    restart(fleet, request, now_us)


def admit_waiting(fleet: Fleet, now_us: int) -> None:
    """Admit from the head of the queue while it fits, and then what may pass it."""
    while (request := fleet.waiting.head()) is not None:
        if end_late_head(fleet, request, now_us):
            continue
        choices = in_time(fleet, request, open_choices(fleet, request), now_us)
        seat = _admit(fleet, request, choices)
        if seat is None:
            if early.take_back_for(fleet, choices):
                continue
            cause = cause_at_door(fleet, request, choices)
            if _frees_old_pages(cause):
                continue
            note_first(fleet, request, cause)
            if cause.kind is WaitKind.PAGES and not _ask_back(fleet, cause):
                _let_pass(fleet, request, now_us)
                if fleet.waiting.head() is not request:
                    continue  # Its tenant has paid for one that passed: others are next.
            return
        _begin(fleet, request, seat, now_us)


def _let_pass(fleet: Fleet, head: Request, now_us: int) -> None:
    """Admit what may pass the head, which waits for pages, and fits."""
    for request in bypass.behind(fleet, head):
        if not bypass.may_pass(fleet, head, request):
            continue
        choices = in_time(fleet, request, open_choices(fleet, request), now_us)
        seat = _admit(fleet, request, choices)
        if seat is not None:
            bypass.note_pass(head, request)
            _begin(fleet, request, seat, now_us, passed=head.request_id)


def _begin(fleet: Fleet, request: Request, seat: Seat, now_us: int, **passed: str) -> None:
    """The request leaves the queue for its seat; `passed` names the one that it passes."""
    fleet.begin(request, seat, now_us)
    request.workers["prefill"] = seat.worker.worker_id
    if request.output_count == 0:
        request.cached_tokens = seat.holding.cached_tokens
    seat.worker.prefilling.append(seat)
    seat.worker.prefilling.sort(key=lambda s: s.request.rank)
    restart(fleet, request, now_us)
    fleet.record(
        LogEvent.REQUEST_ADMITTED,
        request,
        worker=seat.worker.worker_id,
        leg=seat.leg.value,
        output_tokens=request.output_count,
        cached_tokens=seat.holding.cached_tokens,
        queue_us=request.times.spent_us[Phase.WAITING],
        **passed,
    )


def _admit(fleet: Fleet, request: Request, choices: Iterable[Choice]) -> Seat | None:
    for choice in choices:
        seat = _sit_on_soonest(fleet, request, choice)
        if seat is not None:
            _start_prefill(seat)
            return seat
    return None


def _frees_old_pages(cause: Cause) -> bool:
    """The first of a queue waits: rows of the worker keep nothing any more that they do not
    read, and take little until it has its place. True if something was freed by that.
    """
    worker = cause.worker
    if worker is None or cause.group is None:
        return False
    were_wanted, worker.plans_since_wanted = worker.pages_are_wanted, 0
    return not were_wanted and reclaim_all(worker)


def _ask_back(fleet: Fleet, cause: Cause) -> bool:
    """Ask rows for the pages that the first of a queue lacks, if they hold so many ahead.

    True if pages are on their way.
    """
    worker, group = cause.worker, cause.group
    assert worker is not None and group is not None, "pages of no pool"
    keep = least_lead(fleet.settings)
    return is_asked(worker) or ask_back(worker, group, cause.short, keep, or_none=True)


def _sit_on_soonest(fleet: Fleet, request: Request, choice: Choice) -> Seat | None:
    """A seat on the worker, among those with room, that has the fewest prompt positions to run
    until this prompt is finished: those of other prompts, and what of its own is not cached.
    """

    def positions_left(worker: Worker) -> int:
        hit = fleet.find_hit(request, worker, choice.leg)
        return worker.prompt_backlog - (0 if hit is None else hit.tokens)

    workers = sorted(choice.workers, key=lambda w: (positions_left(w), *_by_room(w)))
    return _sit_on_first(fleet, request, choice, workers)


def _sit_on_roomiest(fleet: Fleet, request: Request, choice: Choice) -> Seat | None:
    """A seat on the worker with the most available pages in its first group that has room."""
    return _sit_on_first(fleet, request, choice, sorted(choice.workers, key=_by_room))


def _by_room(worker: Worker) -> tuple[int, WorkerId]:
    return -worker.books.available(0), worker.worker_id


def _sit_on_first(
    fleet: Fleet, request: Request, choice: Choice, workers: Iterable[Worker]
) -> Seat | None:
    for worker in workers:
        seat = fleet.sit(request, worker, choice.leg, choice.lengths)
        if seat is not None:
            return seat
    return None


def _start_prefill(seat: Seat) -> None:
    """Begin the row after what is cached of its prompt.

    A full group's promised pages are taken at once, others by the chunk.
    """
    books, lengths = seat.worker.books, seat.lengths
    for index, group in enumerate(books.layout.groups):
        if isinstance(group.reach, All):
            books.cover(seat.holding, index, lengths.end, surplus=False)
    seat.is_started = True
    seat.worker.add(
        StartRow(
            seat.row,
            seat.request.request_id,
            position=seat.settled,
            output_index=seat.request.output_count,
            limit=lengths.prompt if seat.leg is Leg.SOURCE else lengths.end,
            pages=page_runs(seat),
        )
    )
