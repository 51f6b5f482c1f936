"""The scheduler's decisions: events in, commands out.

`apply` takes one event; `plan` is called once after all that has arrived, and returns the
commands of both. No clock, no socket, no randomness, no log. Token-blind: the core sees
lengths, counts and ids. The same calls in the same order always give the same commands, so
a run can be replayed from its events.
"""

from typing import assert_never

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, Peer, Role
from tidegate.kvcache.books import Books
from tidegate.kvcache.demand import Lengths
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.commands import AcceptRequest, Command, RefuseRequest
from tidegate.scheduler.deadlines import restart
from tidegate.scheduler.door import Refusal, admit_max_tokens, find_refusal
from tidegate.scheduler.events import (
    Cancelled,
    ClientGone,
    Event,
    ReaderChanged,
    Reported,
    RowFaulted,
    Submitted,
    WorkerJoined,
    WorkerLost,
)
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.limits import change_reader
from tidegate.scheduler.losses import lose_worker, patience_ends_us, why_homeless
from tidegate.scheduler.overload import Overload, find_overload
from tidegate.scheduler.planner import make_plan
from tidegate.scheduler.reports import apply_fault, apply_report
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.state import Request, Worker


class Core:
    """One fleet's decisions. Call `apply` for each event, then `plan` once."""

    def __init__(self, settings: CoreSettings) -> None:
        self.fleet = Fleet(settings)

    @property
    def is_idle(self) -> bool:
        """No request is alive and no worker owes an answer."""
        fleet = self.fleet
        return not fleet.requests and not any(w.is_working for w in fleet.workers.values())

    @property
    def wake_us(self) -> int | None:
        """When `plan` must be called next if nothing arrives before."""
        fleet = self.fleet
        times = [
            time_us
            for worker in fleet.workers.values()
            if (time_us := patience_ends_us(worker, fleet.settings)) is not None
        ]
        if fleet.timers.next_us is not None:
            times.append(fleet.timers.next_us)
        return min(times, default=None)

    def apply(self, event: Event, now_us: int) -> None:
        match event:
            case WorkerJoined():
                self._join(event, now_us)
            case WorkerLost():
                lose_worker(self.fleet, event.worker, event.reason, now_us)
            case Reported():
                apply_report(self.fleet, event, now_us)
            case RowFaulted():
                apply_fault(self.fleet, event, now_us)
            case Submitted():
                self._submit(event, now_us)
            case Cancelled():
                self._cancel(event, now_us)
            case ReaderChanged():
                change_reader(self.fleet, event, now_us)
            case ClientGone():
                self._client_gone(event, now_us)
            case _:
                assert_never(event)

    def plan(self, now_us: int) -> list[Command]:
        make_plan(self.fleet, now_us)
        commands, self.fleet.commands = self.fleet.commands, []
        return commands

    def find_overload(self, tenant: str, prompt_tokens: int, now_us: int) -> Overload | None:
        """Why the queue has no room for a request now; None if it has."""
        return find_overload(self.fleet, tenant, prompt_tokens, now_us)

    def longest_prompt(self) -> int:
        """The longest prompt that the door accepts now with one new token; 0 if none."""
        workers = list(self.fleet.workers.values())
        fits, beyond = 0, 1 + max((worker.context for worker in workers), default=0)
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            if find_refusal(workers, Lengths(Tokens(middle), Tokens(1))) is None:
                fits = middle
            else:
                beyond = middle
        return fits

    def check(self) -> None:
        """Assert every invariant of the state. Tests call it after each event."""
        self.fleet.check()
        healthy = self.fleet.healthy()
        for request in self.fleet.requests.values():
            assert why_homeless(request, healthy) is None

    def _join(self, joined: WorkerJoined, now_us: int) -> None:
        fleet = self.fleet
        assert joined.worker not in fleet.workers, "a worker joins once; it is lost before"
        layouts = (worker.layout for worker in fleet.workers.values())
        books = Books(
            # One object for all workers alike, so that they are found alike by its identity.
            next((layout for layout in layouts if layout == joined.layout), joined.layout),
            joined.handle.page_counts,
            note_freed=fleet.settings.poison_freed_pages,
            caches=fleet.settings.prefix_cache and joined.role is not Role.DECODE,
            # What a prefill worker hands over whole can only be hit whole.
            whole_windows=joined.role is Role.PREFILL
            and joined.layout.swa_only_transfer is False,
        )
        worker = Worker(
            joined.worker,
            joined.role,
            joined.pool,
            joined.incarnation,
            joined.handle,
            books,
            joined.context,
            joined.row_count,
            now_us,
            fleet.settings.chunk_tokens,
        )
        for other in fleet.workers.values():
            if other.role is Role.DECODE and worker.role is Role.PREFILL:
                other.add(Peer(worker.pool, worker.incarnation, worker.handle))
            if other.role is Role.PREFILL and worker.role is Role.DECODE:
                worker.add(Peer(other.pool, other.incarnation, other.handle))
        fleet.workers[joined.worker] = worker

    def _submit(self, submitted: Submitted, now_us: int) -> None:
        fleet, settings = self.fleet, self.fleet.settings
        assert submitted.request_id not in fleet.requests, "the shell's ids are unique"
        answer = self._admit_max_tokens(submitted)
        if isinstance(answer, Refusal):
            retry_ms = 0 if answer.status == 400 else settings.retry_after_ms
            self._refuse(submitted, answer, retry_ms)
            return
        # What can never run was told so before: to try again would be of no use.
        overload = self.find_overload(submitted.tenant, submitted.prompt_tokens, now_us)
        if overload is not None:
            self._refuse(submitted, overload.refusal, overload.retry_after_ms)
            return
        request = Request(
            submitted.request_id,
            submitted.client,
            Lengths(Tokens(submitted.prompt_tokens), Tokens(answer)),
            fleet.waiting.shares.open(submitted.priority, submitted.tenant),
            fleet.next_number,
            now_us,
            submitted.unit_hashes,
            timeout_ms=submitted.timeout_ms,
            total_timeout_ms=submitted.total_timeout_ms,
            has_stop_text=submitted.has_stop_text,
        )
        request.is_held = submitted.client in fleet.behind
        fleet.next_number += 1
        fleet.requests[request.request_id] = request
        fleet.by_client.setdefault(request.client, {})[request.request_id] = request
        fleet.enqueue(request)
        restart(fleet, request, now_us)
        fleet.commands.append(AcceptRequest(request.request_id, answer))
        fleet.record(
            LogEvent.REQUEST_ACCEPTED,
            request,
            prompt_tokens=submitted.prompt_tokens,
            max_tokens=answer,
            tenant=submitted.tenant,
        )

    def _admit_max_tokens(self, submitted: Submitted) -> int | Refusal:
        """The door, which counts on healthy workers only, but says "never" for all of them."""
        fleet = self.fleet
        asked = submitted.prompt_tokens, submitted.max_tokens
        default = fleet.settings.default_max_tokens
        healthy, workers = fleet.healthy(), list(fleet.workers.values())
        answer = admit_max_tokens(healthy, *asked, default)
        if len(healthy) == len(workers) or not isinstance(answer, Refusal):
            return answer
        everywhere = admit_max_tokens(workers, *asked, default)
        if isinstance(everywhere, Refusal):
            return everywhere
        text = "the workers that could run it make no progress now"
        return Refusal(503, "no_worker", text)

    def _refuse(self, submitted: Submitted, refusal: Refusal, retry_after_ms: int) -> None:
        self.fleet.commands.append(
            RefuseRequest(
                submitted.request_id,
                refusal.status,
                refusal.code,
                refusal.text,
                refusal.pool,
                refusal.needed,
                refusal.limit,
                refusal.role,
                refusal.worker,
                retry_after_ms,
            )
        )
        self.fleet.record(
            LogEvent.REQUEST_REFUSED,
            submitted.request_id,
            status=refusal.status,
            code=refusal.code,
            text=refusal.text,
            pool=refusal.pool,
            needed=refusal.needed,
            limit=refusal.limit,
            role=refusal.role,
            worker=refusal.worker,
            retry_after_ms=retry_after_ms,
            prompt_tokens=submitted.prompt_tokens,
            max_tokens=submitted.max_tokens,
            tenant=submitted.tenant,
        )

    def _cancel(self, cancelled: Cancelled, now_us: int) -> None:
        request = self.fleet.requests.get(cancelled.request_id)
        if request is None:
            return  # It ended while the cancel was under way.
        kept = max(0, min(cancelled.kept, request.output_count))
        self.fleet.record(
            LogEvent.REQUEST_CANCELLED,
            request,
            phase=request.phase.value,
            reason=cancelled.reason.value,
            kept=kept,
        )
        self.fleet.finish(request, cancelled.reason, now_us, kept=kept)

    def _client_gone(self, gone: ClientGone, now_us: int) -> None:
        fleet = self.fleet
        fleet.behind.pop(gone.client, None)
        requests = list(fleet.by_client.get(gone.client, {}).values())
        fleet.record(
            LogEvent.CLIENT_GONE, client=gone.client, reason=gone.reason, requests=len(requests)
        )
        for request in requests:
            fleet.finish(request, EndReason.CANCELLED, now_us, gone.reason)
