"""Deadlines: in every phase a request waits for something, and not for ever.

A deadline is counted from the request's last named event: accepted, admitted, chunk sent, chunk
done, prefilled, pull sent, decoding, tokens. So it bounds the waiting and not the work:

- for an answer that a worker owes, the stall timeout;
- for a turn or for room, the queue timeout;
- until the first token also the client's own timeout, which in the queue takes the place of
  the queue timeout.
"""

from tidegate.ipc.protocol import EndReason
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.state import Request


def deadline_us(request: Request, settings: CoreSettings) -> int:
    """When the request has waited too long."""
    own_us = request.own_deadline_us
    if request.times.first_token_us is not None:
        own_us = None
    if own_us is not None and request.phase is Phase.WAITING:
        return own_us
    limit_us = settings.queue_timeout_us
    if _worker_owing(request) is not None:
        limit_us = settings.stall_timeout_us
    due_us = request.since_us + limit_us
    if own_us is not None:
        due_us = min(due_us, own_us)
    return due_us


def restart(fleet: Fleet, request: Request, now_us: int) -> None:
    """A named event has happened: the deadline is counted from now."""
    request.since_us = now_us
    fleet.timers.watch(request, deadline_us(request, fleet.settings))


def expire(fleet: Fleet, now_us: int) -> None:
    """End the requests that have waited too long."""
    for request in fleet.timers.take_due(fleet.requests, now_us):
        due_us = deadline_us(request, fleet.settings)
        if due_us <= now_us:
            text = _reason(request, due_us, fleet.settings)
            fleet.finish(request, EndReason.TIMEOUT, now_us, text, status=503)
        else:
            fleet.timers.watch(request, due_us)


def _worker_owing(request: Request) -> str | None:
    """The worker that has yet to answer for this request; None if it waits for its turn."""
    seat = request.source if request.target is None else request.target
    if seat is None or seat.is_ended:
        return None
    is_asked = seat.chunk_until is not None or seat.settled >= seat.lengths.prompt
    is_pulling = request.ticket is not None
    return seat.worker.worker_id if is_asked or is_pulling else None


def _reason(request: Request, due_us: int, settings: CoreSettings) -> str:
    if due_us == request.own_deadline_us:
        seconds = (due_us - request.times.received_us) / 1e6
        return f"its own timeout of {seconds:g} s passed before its first token"
    worker = _worker_owing(request)
    if worker is not None:
        seconds = settings.stall_timeout_us / 1e6
        return f"worker {worker} brought nothing of it for {seconds:g} s, which is the limit"
    seconds = settings.queue_timeout_us / 1e6
    waited = {
        Phase.WAITING: "in the queue",
        Phase.PREFILLING: "for its prompt's next turn",
        Phase.HANDING_OFF: "for room on a decode worker",
    }[request.phase]
    return f"it waited {seconds:g} s {waited}, which is the limit"
