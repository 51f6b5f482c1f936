"""Rows that are to run less far ahead than their pages reach: they sit out at a limit.

- A request whose client looks for stop strings in its text may be over at any token. What its
  row runs beyond that is in vain, so it runs a few tokens ahead and no more.
- The rows of a client that does not keep up with reading sit out where they are, and go on
  when it has caught up. They keep their pages, for as long as `deadlines` allow.
"""

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Limit, WaitKind
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.deadlines import restart
from tidegate.scheduler.events import ReaderChanged
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.state import Seat

STOP_TEXT_AHEAD_TOKENS = Tokens(16)
HELD = Tokens(0)  # The limit of a row that sits out where it is.


def limit_row(fleet: Fleet, seat: Seat) -> None:
    """Tell the worker up to where a decoding row may run now, if that is another position."""
    limit, before = _limit(seat), seat.sits_out_at
    if limit == before:
        return
    seat.sits_out_at = limit
    seat.worker.add(Limit(seat.row, limit))
    worker, request = seat.worker.worker_id, seat.request
    if limit == HELD:
        fleet.record(
            LogEvent.REQUEST_WAITS,
            request,
            phase=request.phase.value,
            reason=WaitKind.READER.value,
            worker=worker,
        )
    elif before == HELD:
        fleet.record(LogEvent.REQUEST_GOES_ON, request, worker=worker)


def next_look(seat: Seat) -> Tokens:
    """The settled position at which the row needs another limit; its end if it needs none."""
    end = seat.lengths.end
    if not seat.request.has_stop_text:
        return end
    return Tokens(min(end, seat.settled + STOP_TEXT_AHEAD_TOKENS // 2))


def change_reader(fleet: Fleet, changed: ReaderChanged, now_us: int) -> None:
    """A client has fallen behind with reading, or has caught up."""
    if changed.is_behind:
        fleet.behind[changed.client] = None
    else:
        fleet.behind.pop(changed.client, None)
    for request in fleet.by_client.get(changed.client, {}).values():
        if request.is_held == changed.is_behind:
            continue
        seat = request.seat if request.phase is Phase.DECODING else None
        if seat is not None and not any(other.owes for other in seat.worker.seats.values()):
            seat.worker.progress_us = now_us  # It owed nothing while its rows sat out.
        request.is_held = changed.is_behind
        if seat is not None:
            limit_row(fleet, seat)
            fleet.look_at(seat)
        restart(fleet, request, now_us)


def _limit(seat: Seat) -> Tokens:
    end = seat.lengths.end
    if seat.request.is_held:
        return HELD
    if not seat.request.has_stop_text:
        return end
    return Tokens(min(end, seat.settled + STOP_TEXT_AHEAD_TOKENS))
