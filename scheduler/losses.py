"""What a worker takes with it when it is lost or makes no progress.

1. The requests that have a place on a lost worker begin anew elsewhere, a bounded number of
   times; those on a worker without progress end.
2. A request that no healthy worker could run to its end any more ends, at once: it would wait
   for nothing, and those behind it with it.

A worker without progress is *suspect*: it gets no new work until it has answered for all that
it was sent. Its pages stay draining until then.
"""

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, PeerGone, Role, WorkerId
from tidegate.kvcache.demand import Leg
from tidegate.scheduler.deadlines import restart
from tidegate.scheduler.door import admission_choices, find_refusal, holding, of_role
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.state import Request, Seat, Worker

RESTART_COUNT_MAX = 3
GONE = "the workers that could run it are gone or make no progress"


def lose_worker(fleet: Fleet, worker_id: WorkerId, reason: str, now_us: int) -> None:
    """The worker is gone for good. Its pages and rows go with its books."""
    worker = fleet.workers.get(worker_id)
    if worker is None:
        return
    text = f"worker {worker_id} is gone: {reason}"
    survivors = [other for other in fleet.healthy() if other is not worker]
    for seat in tuple(worker.seats.values()):
        _begin_anew(fleet, seat, survivors, now_us, text)
    del fleet.workers[worker_id]
    for other in fleet.workers.values():
        if other.role is Role.DECODE and worker.role is Role.PREFILL:
            other.add(PeerGone(worker.pool, worker.incarnation))
    end_homeless(fleet, now_us)


def suspect_stalled(fleet: Fleet, now_us: int) -> None:
    """Give up on workers that owe an answer to a plan, or anything of a row, for too long."""
    stall_us = fleet.settings.stall_timeout_us
    stalled = [
        worker
        for worker in fleet.healthy()
        if (since_us := worker.owes_since_us) is not None and now_us - since_us >= stall_us
    ]
    for worker in stalled:
        worker.is_suspect = True
        text = f"worker {worker.worker_id} gave no answer for {stall_us / 1e6:g} s"
        fleet.record(LogEvent.WORKER_SUSPECT, worker=worker.worker_id, text=text)
        for seat in tuple(worker.seats.values()):
            fleet.finish(seat.request, EndReason.TIMEOUT, now_us, text, status=503)
    if stalled:
        end_homeless(fleet, now_us)


def end_homeless(fleet: Fleet, now_us: int) -> None:
    """End what no healthy worker could run to its end."""
    healthy = fleet.healthy()
    for request in tuple(fleet.requests.values()):
        reason = why_homeless(request, healthy)
        if reason is not None:
            fleet.finish(request, EndReason.ERROR, now_us, f"{GONE}: {reason}", status=503)


def why_homeless(request: Request, healthy: list[Worker]) -> str | None:
    """Why none of these could ever hold a request that has still to find a worker.

    None if one could, or if it has its last place already.
    """
    if request.phase is Phase.WAITING:
        if admission_choices(healthy, request):
            return None
        refusal = find_refusal(healthy, request.remaining)
        return "no worker is left that holds it" if refusal is None else refusal.text
    source = request.source
    if source is None or source.leg is Leg.WHOLE or request.target is not None:
        return None
    if holding(of_role(healthy, Role.DECODE), Leg.TARGET, source.lengths):
        return None
    return "no decode worker is left that holds it"


def _begin_anew(
    fleet: Fleet, seat: Seat, survivors: list[Worker], now_us: int, text: str
) -> None:
    """A request whose worker is lost runs elsewhere, with the tokens that it has brought."""
    request = seat.request
    keeps_source = seat is request.target and request.phase is Phase.HANDING_OFF
    if keeps_source:
        fits = bool(holding(of_role(survivors, Role.DECODE), Leg.TARGET, seat.lengths))
    else:
        fits = bool(admission_choices(survivors, request))
    if not fits:
        fleet.finish(request, EndReason.ERROR, now_us, text, status=503)
    elif request.restart_count >= RESTART_COUNT_MAX:
        text = f"{text}; the request has begun anew {RESTART_COUNT_MAX} times already"
        fleet.finish(request, EndReason.ERROR, now_us, text, status=503)
    else:
        request.restart_count += 1
        if keeps_source:
            fleet.void_pull(request)
            fleet.await_target(request)
        else:
            fleet.requeue(request, now_us)
        restart(fleet, request, now_us)
