"""Pages that decoding rows hold ahead and that others need at once are asked back.

1. What a row reads no more comes back without asking: it may have been left to it, as long as
   there was room.
2. A row is asked to give back the pages beyond some position (`Trim`), the lowest rank first.
   It goes on while it is asked, and its worker knows best how far it has come: the answer says
   which pages no launch has fed. They are free at once.
3. Until the answer the row takes no page.

A request loses nothing by it: it takes pages anew when they are there.
"""

import numpy as np

from tidegate.ipc.protocol import Row, Trim, Trimmed
from tidegate.kvcache.layout import Pages, Tokens
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.row_arrays import NO_EVENT
from tidegate.scheduler.state import Seat, Worker


def reclaim_all(worker: Worker) -> bool:
    """Free what decoding rows read no more, now and as they go on. Was there any?"""
    before = worker.books.all_available()
    for seat in worker.seats.values():
        if seat.request.phase is not Phase.DECODING:
            continue
        worker.books.reclaim(seat.holding, seat.settled)
        past = worker.books.next_reclaim(seat.holding)
        if past is not None and past < seat.next_event:
            seat.next_event = past
    return worker.books.all_available() != before


def is_asked(worker: Worker) -> bool:
    """Some row of the worker has yet to say what it gives back."""
    return any(seat.is_asked_back for seat in worker.seats.values())


def ask_back(
    worker: Worker, group: int, count: Pages, keep: Tokens, *, or_none: bool = False
) -> bool:
    """Have rows give back pages of the group, beyond the `keep` positions that each keeps.

    Asks for `count` pages, or for as many as there are; with `or_none` for none if they are
    fewer. False if nothing is asked.
    """
    asked: list[Seat] = []
    found = 0
    for seat in _with_surplus(worker, group, keep):
        if found >= count:
            break
        pages = surplus(seat, group, keep)
        if pages:
            asked.append(seat)
            found += pages
    if or_none and found < count:
        return False
    for seat in asked:
        _ask(seat, Tokens(seat.settled + keep))
    return bool(asked)


def surplus(seat: Seat, group: int, keep: Tokens) -> Pages:
    """Pages of the group that the row could give back and still have `keep` positions.

    What is within its reserve was promised to it, and would be of no use to others.
    """
    table = seat.holding.tables[group]
    until = Tokens(max(seat.settled + keep, seat.needs_until))
    beyond_reserve = table.page_count - seat.holding.reserve[group]
    return Pages(max(0, min(table.beyond(until), beyond_reserve)))


def give_back(seat: Seat, trimmed: Trimmed) -> bool:
    """Free the pages that the row's worker says it has given up.

    False, and nothing is freed, if it cannot have done so.
    """
    counts, holding, books = trimmed.page_counts, seat.holding, seat.worker.books
    if not seat.is_asked_back or len(counts) != len(holding.tables):
        return False
    until = max(seat.needs_until, seat.settled)
    for count, table in zip(counts, holding.tables, strict=True):
        if not 0 <= count <= table.beyond(until):
            return False
    for group, count in enumerate(counts):
        books.shed(holding, group, Pages(count))
    seat.worker.rows.covered[seat.row] = holding.covered
    seat.is_asked_back = False
    # Its worker has fed something of each page that it keeps beyond what it was asked for.
    kept = max(table.last_page_start for table in holding.tables)
    seat.needs_until = max(seat.needs_until, Tokens(kept + 1))
    return True


def _ask(seat: Seat, until: Tokens) -> None:
    seat.is_asked_back, seat.needs_until = True, until
    seat.next_event = NO_EVENT  # It may have fewer pages at any moment.
    seat.worker.add(Trim(seat.row, until))


def _with_surplus(worker: Worker, group: int, keep: Tokens) -> list[Seat]:
    """Rows that may have some, the lowest rank first."""
    rows, page = worker.rows, worker.layout.groups[group].page_tokens
    found = np.flatnonzero(rows.covered - rows.settled >= keep + page)
    seats = [worker.seats[Row(row)] for row in found.tolist()]
    return sorted(
        (seat for seat in seats if not seat.is_asked_back),
        key=lambda seat: seat.request.rank,
        reverse=True,
    )
