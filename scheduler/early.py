"""Early destinations: a place on a decode worker for a prompt that still runs.

Its settled pages move there while the next chunk is computed, and little is left to move when
the last one is answered. Such a place is a favour, and costs nobody anything:

1. A prompt of which a page is settled takes one, its whole reserve, only where there is room
   for two like it right now, and nobody waits for anything of that worker. It never waits.
2. Each plan has it pull the pages that have settled since. If a pull fails or the worker is
   lost, the place goes and the prompt runs on.
3. Whoever lacks a page or a row of that worker takes all such places back first
   (`take_back`), before any row is asked for what it holds ahead or gives way. Pages that
   nothing was copied into are free at once; the others drain. A prompt whose place was taken
   back gets no other until it begins anew.
4. When the prompt is finished, and no other that goes before it lacks a destination, the
   place becomes its target (`promote`), and the rest is pulled. Whoever must wait for a
   destination gives its early place up.
"""

from collections.abc import Iterable

import numpy as np

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Row
from tidegate.kvcache.demand import Leg, Lengths, first_reserves
from tidegate.kvcache.layout import All, Pages
from tidegate.scheduler.deadlines import restart
from tidegate.scheduler.door import Choice
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.pulls import early_end, start_early_pull
from tidegate.scheduler.state import Request, Seat, Worker
from tidegate.scheduler.surplus import is_asked
from tidegate.scheduler.waits import open_choices, target_choice

WANTED = "its room is wanted"
FAILED = "its pull failed"
LOST = "its worker is lost"
MUST_WAIT = "its request must wait for a destination"


def move_early(fleet: Fleet) -> None:
    """Give prompts that run a place, where one is to be had, and move what has settled."""
    if not fleet.settings.early_handoff:
        return
    running = [
        seat
        for worker in fleet.healthy()
        for seat in worker.prefilling
        if seat.leg is Leg.SOURCE and 0 < seat.settled < seat.lengths.prompt
    ]
    for source in sorted(running, key=lambda seat: seat.request.rank):
        request = source.request
        until = early_end(source)
        if request.early is None and until > 0 and not fleet.awaiting_target:
            _take(fleet, request, source)
        target = request.early
        if target is not None and request.ticket is None and target.pulled.until < until:
            start_early_pull(fleet, request, target, until)


def take_back(fleet: Fleet, worker: Worker) -> bool:
    """Somebody lacks pages or a row of the worker. Was there an early place to take back?"""
    seats = tuple(worker.early.values())
    for seat in seats:
        give_up(fleet, seat.request, WANTED)
    return bool(seats)


def take_back_for(fleet: Fleet, choices: Iterable[Choice]) -> bool:
    """As `take_back`, for somebody who finds room on none of these workers."""
    taken = [take_back(fleet, worker) for choice in choices for worker in choice.workers]
    return any(taken)


def give_up(fleet: Fleet, request: Request, reason: str) -> None:
    """The request's early place goes, and it gets no other. All else of it stays."""
    seat = request.early
    assert seat is not None
    fleet.record(
        LogEvent.EARLY_HANDOFF_ENDED,
        request,
        worker=seat.worker.worker_id,
        reason=reason,
        bytes_moved=seat.pulled.byte_count,
    )
    request.tries_early_beyond = seat.lengths.prompt
    fleet.leave_early(request)


def pull_failed(fleet: Fleet, request: Request, now_us: int) -> None:
    """A pull that was sent early has failed: the request goes on as if there had been none."""
    if request.target is None:
        give_up(fleet, request, FAILED)
    else:
        fleet.void_pull(request)
        fleet.await_target(request)
        restart(fleet, request, now_us)


def give_up_waiting(fleet: Fleet) -> None:
    """Whoever must wait for a destination holds none meanwhile."""
    for request in fleet.awaiting_target:
        if request.early is not None:
            give_up(fleet, request, MUST_WAIT)


def promote(fleet: Fleet, request: Request) -> Seat | None:
    """The prompt is finished: its early place, if it has one, becomes a target like others.

    As each row that grows there must be able to take a page, others' early places go first,
    and if that is not enough its own.
    """
    seat = request.early
    if seat is None:
        return None
    if not _can_grow(seat.worker):
        for other in tuple(seat.worker.early.values()):
            if other is not seat:
                give_up(fleet, other.request, WANTED)
    if not _can_grow(seat.worker):
        give_up(fleet, request, WANTED)
        return None
    fleet.keep_early(request)
    return seat


def _take(fleet: Fleet, request: Request, source: Seat) -> None:
    """Take a place on the roomiest worker with room to spare, if there is one.

    It is tried anew when more of the prompt has settled.
    """
    if source.settled <= request.tries_early_beyond:
        return
    request.tries_early_beyond = source.settled
    choice = target_choice(fleet, request)
    workers = [
        worker
        for worker in choice.workers
        if _has_room_to_spare(worker, choice.lengths) and not _is_waited_for(worker)
    ]
    head = fleet.waiting.head()
    if workers and head is not None:
        # Who begins anew may have its place on a decode worker.
        wanted = [worker for each in open_choices(fleet, head) for worker in each.workers]
        workers = [worker for worker in workers if worker not in wanted]
    if not workers:
        return
    worker = min(workers, key=lambda w: (-w.books.available(0), w.worker_id))
    seat = fleet.sit(request, worker, Leg.TARGET, choice.lengths, is_early=True)
    assert seat is not None, "there is room to spare"
    request.early = seat
    fleet.record(
        LogEvent.EARLY_HANDOFF_STARTED,
        request,
        source=source.worker.worker_id,
        target=worker.worker_id,
    )


def _has_room_to_spare(worker: Worker, lengths: Lengths) -> bool:
    """Room for two such places, and a page for each row that grows."""
    groups = worker.layout.groups
    reserves = first_reserves(worker.layout, Leg.TARGET, lengths)
    return len(worker.rows_free) >= 2 and not worker.books.shortage(
        [
            Pages(2 * pages + (worker.growing_count if isinstance(group.reach, All) else 0))
            for group, pages in zip(groups, reserves, strict=True)
        ]
    )


def _is_waited_for(worker: Worker) -> bool:
    """Somebody waits for its pages, or a row has fewer than it would take."""
    if worker.pages_are_wanted or worker.short or is_asked(worker):
        return True
    rows = worker.rows
    at_end = np.flatnonzero((rows.covered > 0) & (rows.covered <= rows.settled))
    seats = [worker.seats[Row(row)] for row in at_end.tolist()]
    return any(s.is_starving and s.request.phase is Phase.DECODING for s in seats)


def _can_grow(worker: Worker) -> bool:
    """Could each row that grows take a page?"""
    return all(
        worker.books.available(index) >= worker.growing_count
        for index, group in enumerate(worker.layout.groups)
        if isinstance(group.reach, All)
    )
