"""What a worker takes with it when it is lost or makes no progress.

1. The requests that have a place on it end.
2. A request that no healthy worker could run to its end any more ends as well, at once: it
   would wait for nothing, and those behind it with it.

A worker without progress is *suspect*: it gets no new work until it has answered for all that
it was sent. Its pages stay draining until then.
"""

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, PeerGone, Role, WorkerId
from tidegate.kvcache.demand import Leg
from tidegate.scheduler.door import find_refusal, of_role, shortage
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.state import Request, Worker


def lose_worker(fleet: Fleet, worker_id: WorkerId, reason: str, now_us: int) -> None:
    """The worker is gone for good. Its pages and rows go with its books."""
    worker = fleet.workers.get(worker_id)
    if worker is None:
        return
    text = f"worker {worker_id} is gone: {reason}"
    fleet.end_all((seat.request for seat in worker.seats.values()), now_us, text)
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
            text = f"the workers that could run it are gone or make no progress: {reason}"
            fleet.finish(request, EndReason.ERROR, now_us, text, status=503)


def why_homeless(request: Request, healthy: list[Worker]) -> str | None:
    """Why none of these could ever hold a request that has still to find a worker.

    None if one could, or if it has its last place already.
    """
    if request.phase is Phase.WAITING:
        refusal = find_refusal(healthy, request.lengths)
        return None if refusal is None else refusal.text
    source = request.source
    if source is None or source.leg is Leg.WHOLE or request.target is not None:
        return None
    targets = of_role(healthy, Role.DECODE)
    if any(shortage(worker, Leg.TARGET, request.lengths) is None for worker in targets):
        return None
    return "no decode worker is left that holds it"
