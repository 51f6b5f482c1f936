"""Pages for rows that decode: growth page by page, and who gives way when there are none.

1. A row takes pages for the positions that it may run ahead, as far as they are available.
2. A row without a page for its next position starves. Pages that drain are waited for.
3. Otherwise the request of lowest rank on that worker is preempted, which may be the one that
   starves: its pages drain, and it waits anew with the tokens that it has brought.

Ranks are fixed when a request is accepted. The request of highest rank on a worker is never
preempted, and alone it always fits: so every round somebody gets to its end.
"""

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Grow, PageRun, pack_ids
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.deadlines import restart
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.row_arrays import NO_EVENT
from tidegate.scheduler.state import Request, Seat
from tidegate.scheduler.wait_records import note_fed, note_starving


def grow_decoding(fleet: Fleet, now_us: int) -> None:
    """Look at the rows that have come to the end of their pages, in order of rank."""
    due, fleet.due = fleet.due, []
    for seat in sorted(due, key=lambda seat: seat.request.rank):
        if seat.worker.seats.get(seat.row) is not seat or seat.settled < seat.next_event:
            continue
        for group, ids in cover_decode(fleet, seat):
            seat.worker.add(Grow(seat.row, group, ids))
        if seat.is_starving:
            make_room(fleet, seat, now_us)
            note_starving(fleet, seat)
            # If it is still here, it is looked at again in the next plan.
            fleet.due.append(seat)
        else:
            note_fed(fleet, seat)


def cover_decode(fleet: Fleet, seat: Seat) -> list[tuple[int, bytes]]:
    """Take pages for the positions that a decoding row may feed next; returns what is new.

    Sets `next_event`: the settled position at which the pages no longer cover all that the
    row may run ahead, or a page is no longer read. Below it nothing is due.
    """
    books, holding, end = seat.worker.books, seat.holding, seat.lengths.end
    ahead = fleet.settings.ahead_tokens
    until = Tokens(min(end, seat.settled + ahead))
    new: list[tuple[int, bytes]] = []
    next_event = end
    for index, group in enumerate(books.layout.groups):
        table = holding.tables[index]
        pages = books.cover(holding, index, until, surplus=True)
        if pages:
            new.append((index, pack_ids(pages)))
        past = group.first_past(table.first_page_end)
        if past is not None:
            next_event = min(next_event, past)
    covered, settled = holding.covered, seat.settled
    if covered <= settled < end or seat.awaits_token:
        # It starves, and is looked at in every plan; or no token has come from here yet.
        next_event = NO_EVENT
    elif covered < until:
        next_event = Tokens(settled + 1)  # Pages were short: with its next token.
    elif covered < end:
        next_event = min(next_event, Tokens(covered - ahead + 1))
    seat.next_event = next_event
    return new


def make_room(fleet: Fleet, seat: Seat, now_us: int) -> None:
    """Have the request of lowest rank on the worker give way, unless pages are on their way."""
    worker = seat.worker
    short = [
        index
        for index, table in enumerate(seat.holding.tables)
        if table.covered <= seat.settled
    ]
    if all(worker.books.pools[index].draining_count > 0 for index in short):
        return
    victim = max(worker.seats.values(), key=lambda other: other.request.rank)
    pools = ", ".join(worker.layout.groups[index].name for index in short)
    preempt(fleet, victim, now_us, by=seat.request, pools=pools)


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
