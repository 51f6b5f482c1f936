"""Records of what requests wait for: one when it changes, and none while it stays the same.

The cost of a plan does not grow with the queue: of those that wait in a queue, each plan looks
at the first, and once at each that has joined it.
"""

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Waiting, WaitKind
from tidegate.scheduler.commands import FieldValue
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.state import Request, Seat
from tidegate.scheduler.waits import Cause, cause_of_starving, describe


def note_first(fleet: Fleet, request: Request, cause: Cause) -> None:
    """The first of a queue has found no room on any of its choices."""
    assert cause.kind is not WaitKind.TURN, "a request waits for a worker that has room for it"
    _note(fleet, request, cause)


def note_newcomers(fleet: Fleet) -> None:
    """Those that have joined a queue since the last plan and are not its first wait for it."""
    newcomers, fleet.newcomers = fleet.newcomers, []
    for request in newcomers:
        if request.waits_for:
            continue
        if request.phase is Phase.WAITING:
            first, length = fleet.waiting.head(), len(fleet.waiting)
        elif request.phase is Phase.HANDING_OFF and request.target is None:
            first, length = fleet.awaiting_target[0], len(fleet.awaiting_target)
        else:
            continue
        if first is None or first is request:
            continue
        request.waits_for = WaitKind.TURN.value
        fleet.record(
            LogEvent.REQUEST_WAITS,
            request,
            phase=request.phase.value,
            reason=WaitKind.TURN.value,
            first=first.request_id,
            queue_length=length,
        )


def note_starving(fleet: Fleet, seat: Seat) -> None:
    """A decoding row has no page for its next position, unless it has just given way."""
    if seat.worker.seats.get(seat.row) is seat:
        _note(fleet, seat.request, cause_of_starving(seat))


def note_fed(fleet: Fleet, seat: Seat) -> None:
    """A decoding row has a page for its next position, perhaps after it had none."""
    if seat.request.waits_for:
        seat.request.waits_for = ""
        fleet.record(LogEvent.REQUEST_GOES_ON, seat.request, worker=seat.worker.worker_id)


def _note(fleet: Fleet, request: Request, cause: Cause) -> None:
    if cause.key != request.waits_for:
        request.waits_for = cause.key
        fleet.record(LogEvent.REQUEST_WAITS, request, **_fields(describe(request, cause)))


def _fields(waiting: Waiting) -> dict[str, FieldValue]:
    assert waiting.phase is not None
    fields: dict[str, FieldValue] = {
        "phase": waiting.phase.value,
        "reason": waiting.kind.value,
    }
    if waiting.first is not None:
        fields |= {"first": waiting.first, "ahead": waiting.ahead}
    if waiting.role is not None:
        fields |= {"role": waiting.role.value, "worker": waiting.worker}
    if waiting.passed:
        fields["passed_by"] = waiting.passed
    if waiting.pool:
        fields |= {
            "pool": waiting.pool,
            "pages_short": waiting.pages_short,
            "pages_needed": waiting.pages_needed,
            "pages_available": waiting.pages_available,
            "pages_draining": waiting.pages_draining,
            "pages_cached": waiting.pages_cached,
            "holders": {h.request_id: h.page_count for h in waiting.holders},
            "holders_left_out": waiting.holders_left_out,
        }
    return fields
