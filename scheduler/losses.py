"""What a worker takes with it when it is lost or makes no progress.

1. The requests that have a place on it begin anew elsewhere, a bounded number of times.
2. A request that no healthy worker could run to its end any more ends, at once: it would wait
   for nothing, and those behind it with it.

A worker that owes an answer for too long is *suspect*: it gets no new work until it has
answered for all that it was sent, and its pages drain until then. If it does not in time, it
is *fenced*: lost for good, whether its process still lives or not. Should it go on later,
nobody listens to it, and it can have written to no pool but its own.
"""

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, PeerGone, Role, WorkerId
from tidegate.kvcache.demand import Leg
from tidegate.scheduler import early
from tidegate.scheduler.commands import FenceWorker
from tidegate.scheduler.deadlines import restart
from tidegate.scheduler.door import admission_choices, find_refusal, holding, of_role
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings
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


def patience_ends_us(worker: Worker, settings: CoreSettings) -> int | None:
    """When the worker becomes suspect, or is fenced, unless it answers; else None.

    A suspect worker is fenced whatever it has answered in between, if not for everything.
    """
    if worker.suspect_since_us is not None:
        return worker.suspect_since_us + settings.fence_timeout_us
    since_us = _owes_since_us(worker)
    return None if since_us is None else since_us + settings.stall_timeout_us


def judge_workers(fleet: Fleet, now_us: int) -> None:
    """Suspect workers that owe an answer to a plan, or anything of a row, for too long; fence
    those that are suspect for too long."""
    late = [
        worker
        for worker in fleet.workers.values()
        if (end_us := patience_ends_us(worker, fleet.settings)) is not None and end_us <= now_us
    ]
    for worker in late:
        if worker.is_suspect:
            _fence(fleet, worker, now_us)
        else:
            worker.suspect_since_us = now_us
    # All are suspect before any of their requests looks for another place.
    for worker in late:
        if worker.suspect_since_us == now_us:
            _empty(fleet, worker, now_us)
    if late:
        end_homeless(fleet, now_us)


def _empty(fleet: Fleet, worker: Worker, now_us: int) -> None:
    """The requests of a worker that has become suspect begin anew, or end."""
    seconds = fleet.settings.stall_timeout_us / 1e6
    text = f"worker {worker.worker_id} gave no answer for {seconds:g} s"
    fleet.record(LogEvent.WORKER_SUSPECT, worker=worker.worker_id, text=text)
    for seat in tuple(worker.seats.values()):
        _begin_anew(fleet, seat, fleet.healthy(), now_us, text, EndReason.TIMEOUT)


def _fence(fleet: Fleet, worker: Worker, now_us: int) -> None:
    seconds = (fleet.settings.stall_timeout_us + fleet.settings.fence_timeout_us) / 1e6
    reason = f"it made no progress for {seconds:g} s, and is fenced"
    fleet.commands.append(FenceWorker(worker.worker_id, reason))
    fleet.record(LogEvent.WORKER_FENCED, worker=worker.worker_id, text=reason)
    lose_worker(fleet, worker.worker_id, reason, now_us)


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
    fleet: Fleet,
    seat: Seat,
    survivors: list[Worker],
    now_us: int,
    text: str,
    reason: EndReason = EndReason.ERROR,
) -> None:
    """A request whose worker is lost runs elsewhere, with the tokens that it has brought."""
    request = seat.request
    if seat.is_early:
        early.give_up(fleet, request, early.LOST)
        return
    keeps_source = seat is request.target and request.phase is Phase.HANDING_OFF
    if keeps_source:
        fits = bool(holding(of_role(survivors, Role.DECODE), Leg.TARGET, seat.lengths))
    else:
        fits = bool(admission_choices(survivors, request))
    if not fits:
        fleet.finish(request, reason, now_us, text, status=503)
    elif request.restart_count >= RESTART_COUNT_MAX:
        text = f"{text}; the request has begun anew {RESTART_COUNT_MAX} times already"
        fleet.finish(request, reason, now_us, text, status=503)
    else:
        request.restart_count += 1
        if keeps_source:
            fleet.void_pull(request)
            fleet.await_target(request)
        else:
            fleet.requeue(request, now_us)
        restart(fleet, request, now_us)


def _owes_since_us(worker: Worker) -> int | None:
    """Since when the oldest answer that it owes is due; None if it owes nothing."""
    since: list[int] = []
    if worker.completed < worker.seq:
        since.append(worker.answered_us)
    if any(seat.owes for seat in worker.seats.values()):
        since.append(worker.progress_us)
    return min(since, default=None)
