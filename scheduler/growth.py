"""Pages for rows that decode: growth page by page, and who gives way when there are none.

1. A row takes pages for the positions that it may run ahead, as far as they are available; how
   far that is, `run_ahead` says.
2. A row that has fewer tries again when others have become available.
3. A row without a page for its next position starves. What prompts that still run hold early
   on its worker is taken back. Pages that drain are waited for, and so are those that other
   rows hold ahead and can give back.
4. Otherwise the request of lowest rank on that worker is preempted, which may be the one that
   starves: its pages drain, and it waits anew with the tokens that it has brought.

Ranks are fixed when a request begins. The request of highest rank on a worker is never
preempted, and alone it always fits: so every round somebody gets to its end.
"""

from collections.abc import Sequence

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Grow, PageRun, pack_ids
from tidegate.kvcache.layout import Pages, Tokens
from tidegate.scheduler import early
from tidegate.scheduler.deadlines import restart
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.limits import limit_row, next_look
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.row_arrays import NO_EVENT
from tidegate.scheduler.run_ahead import lead_of
from tidegate.scheduler.state import Request, Seat, Worker
from tidegate.scheduler.surplus import ask_back, is_asked, reclaim_all
from tidegate.scheduler.wait_records import note_fed, note_starving

STARVING_KEEPS = Tokens(1)  # Positions that rows keep of what they hold ahead.


def grow_decoding(fleet: Fleet, now_us: int) -> None:
    """Look at the rows that have come to the end of their pages, in order of rank."""
    starving: dict[Worker, list[Seat]] = {}
    for seat in sorted(_due(fleet), key=lambda seat: seat.request.rank):
        if seat.request.is_held:
            limit_row(fleet, seat)  # It sits out, and takes no page.
            continue
        _grow(fleet, seat)
        if seat.is_starving and early.take_back(fleet, seat.worker):
            _grow(fleet, seat)
        if seat.is_starving and _is_short_of_old(seat):
            reclaim_all(seat.worker)
            _grow(fleet, seat)
        limit_row(fleet, seat)
        if seat.is_starving:
            starving.setdefault(seat.worker, []).append(seat)
        else:
            note_fed(fleet, seat)
    for worker, seats in starving.items():
        make_room(fleet, worker, seats, now_us)
        for seat in seats:
            note_starving(fleet, seat)
            # If it is still here, it is looked at again in the next plan.
            fleet.look_at(seat)
    for worker in fleet.workers.values():
        if worker.short:
            worker.pages_seen = worker.books.all_available()


def _due(fleet: Fleet) -> list[Seat]:
    found = [
        seat
        for seat in fleet.take_due()
        if seat.worker.seats.get(seat.row) is seat and seat.settled >= seat.next_event
    ]
    for worker in fleet.workers.values():
        if worker.short:
            found += [seat for seat in _short_with_room(worker) if seat not in found]
    return [seat for seat in found if not seat.is_asked_back]


def _short_with_room(worker: Worker) -> Sequence[Seat]:
    """The rows that are short of pages, if more are available than when they last tried."""
    available = worker.books.all_available()
    if any(now > before for now, before in zip(available, worker.pages_seen, strict=True)):
        return tuple(worker.short.values())
    worker.pages_seen = list(map(min, available, worker.pages_seen))
    return ()


def _grow(fleet: Fleet, seat: Seat) -> None:
    for group, ids in cover_decode(fleet, seat):
        seat.worker.add(Grow(seat.row, group, ids))


def cover_decode(fleet: Fleet, seat: Seat) -> list[tuple[int, bytes]]:
    """Take pages for the positions that a decoding row may feed next; returns what is new.

    Sets `next_event`: the settled position at which the row needs more pages, or a page is no
    longer read and there is a need of it. Below it nothing is due.
    """
    worker, holding, end, settled = seat.worker, seat.holding, seat.lengths.end, seat.settled
    lead = lead_of(seat, fleet.settings)
    until = Tokens(min(end, settled + lead.high))
    new: list[tuple[int, bytes]] = []
    for index, _ in enumerate(worker.layout.groups):
        pages = worker.books.cover(holding, index, until, surplus=True)
        if pages:
            new.append((index, pack_ids(pages)))
    past = None if lead.is_roomy else worker.books.next_reclaim(holding)
    next_event = end if past is None else min(end, past)
    covered = holding.covered
    worker.rows.covered[seat.row] = covered
    worker.short.pop(seat.row, None)
    if covered <= settled < end or seat.awaits_token:
        # It starves, and is looked at in every plan; or no token has come from here yet.
        next_event = NO_EVENT
    elif covered < min(end, settled + lead.low):
        worker.short[seat.row] = seat
        next_event = min(next_event, covered)
    elif covered < end:
        next_event = min(next_event, Tokens(covered - lead.low + 1))
    seat.next_event = min(next_event, next_look(seat))
    return new


def make_room(fleet: Fleet, worker: Worker, starving: Sequence[Seat], now_us: int) -> None:
    """Have rows of the worker give up pages, unless some are on their way.

    `starving` are in order of rank. First goes what others hold ahead, and then the request of
    lowest rank gives way.
    """
    seat = starving[0]
    short = _short_groups(seat)
    if is_asked(worker) or all(worker.books.pools[g].draining_count > 0 for g in short):
        return
    for group in short:
        count = Pages(sum(group in _short_groups(other) for other in starving))
        if ask_back(worker, group, count, STARVING_KEEPS):
            return
    victim = max(worker.seats.values(), key=lambda other: other.request.rank)
    pools = ", ".join(worker.layout.groups[group].name for group in short)
    preempt(fleet, victim, now_us, by=seat.request, pools=pools)


def _short_groups(seat: Seat) -> list[int]:
    """The groups in which it has no page for its next position."""
    tables = seat.holding.tables
    return [group for group, table in enumerate(tables) if table.covered <= seat.settled]


def _is_short_of_old(seat: Seat) -> bool:
    """It starves in a group of which pages come back as rows go on."""
    groups = seat.worker.layout.groups
    return any(groups[group].gives_back for group in _short_groups(seat))


def preempt(fleet: Fleet, victim: Seat, now_us: int, *, by: Request, pools: str) -> None:
    """Take the victim's pages. With its prompt still held elsewhere, only its pull is void."""
    request = victim.request
    request.preemption_count += 1
    fleet.record(
        LogEvent.REQUEST_PREEMPTED,
        request,
        worker=victim.worker.worker_id,
        phase=request.phase.value,
        output_tokens=request.output_count,
        pool=pools,
        by=by.request_id,
    )
    if request.phase is Phase.HANDING_OFF:
        fleet.void_pull(request)
        fleet.await_target(request)
    else:
        fleet.requeue(request, now_us)
    restart(fleet, request, now_us)


def page_runs(seat: Seat) -> tuple[PageRun, ...]:
    """The seat's page tables as they go into a `Start`."""
    return tuple(
        PageRun(table.first_position, pack_ids(table.ids)) for table in seat.holding.tables
    )
