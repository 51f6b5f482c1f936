"""A fleet in virtual time: a policy, workers whose launches last, and a trace of requests.

An instant has a fixed order. What ends now is reported, what arrives now is submitted, then the
policy plans once, and then the workers begin what they can. Messages take no time: the
scheduler's own costs are measured elsewhere, and are small beside a launch.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from cost_model import Costs
from doors import Policy
from goodput import Ending, Fate
from request_traces import TraceRequest
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, RequestId, WorkerId
from tidegate.scheduler.commands import (
    EmitTokens,
    FinishRequest,
    Record,
    RefuseRequest,
    SendPlan,
    StartRow,
)
from tidegate.scheduler.events import ClientId, Reported, Submitted, WorkerJoined
from timed_worker import Pull, Sampled, TimedWorker

OWN_TIMEOUT = "its own timeout"  # In the text of an end for a client's own deadline.


class FleetError(Exception):
    """The policy did what cannot be, or came to no end."""


class Run(msgspec.Struct, frozen=True):
    """`busy_share` is of each worker, from the first arrival to the last ending."""

    fates: tuple[Fate, ...]
    busy_share: Mapping[WorkerId, float]
    last_us: int


class VirtualFleet:
    """One run of one trace. Request i of the trace is named after i."""

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[WorkerJoined],
        costs: Costs,
        requests: Sequence[TraceRequest],
        *,
        speed: float,
        timeout_ms: int | None = None,
        unit_hashes: Callable[[TraceRequest], tuple[bytes, ...]] = lambda _: (),
    ) -> None:
        """Requests come `speed` times as fast as the trace says. `timeout_ms` is what each
        client allows until its first token; None: as long as the policy waits."""
        self._policy = policy
        self._requests = requests
        self._timeout_ms = timeout_ms
        self._unit_hashes = unit_hashes
        self._fates = [
            Fate(round(request.at_us / speed), request.output_tokens) for request in requests
        ]
        prompts = {name_of(i): request.prompt_tokens for i, request in enumerate(requests)}
        self._workers = {
            joined.worker: TimedWorker(joined, costs, prompts) for joined in workers
        }
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._now_us = 0
        self._last_us = 0  # When the last request so far ended.
        self._wake_us: int | None = None
        self._stirred: set[WorkerId] = set()  # Workers that have something to look at.
        self._reports: list[tuple[Sampled, ...]] = []  # Of this turn.

    def run(self) -> Run:
        """Raises `FleetError` if a request comes to no end."""
        for worker in self._workers.values():
            self._policy.apply(worker.joined, 0)
        for index, fate in enumerate(self._fates):
            self._at(fate.at_us, partial(self._submit, index))
        self._turn()
        while self._events:
            self._now_us = self._events[0][0]
            while self._events and self._events[0][0] == self._now_us:
                heapq.heappop(self._events)[2]()
            self._turn()
        unended = [index for index, fate in enumerate(self._fates) if fate.ending is None]
        if unended:
            raise FleetError(f"{len(unended)} requests have no end, the first is {unended[0]}")
        last_us = max(1, self._last_us)
        busy = {name: worker.busy_us / last_us for name, worker in self._workers.items()}
        return Run(tuple(self._fates), busy, last_us)

    def _at(self, time_us: int, happen: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_us, self._sequence, happen))

    # --- Events ---

    def _submit(self, index: int) -> None:
        request = self._requests[index]
        submitted = Submitted(
            name_of(index),
            ClientId("trace"),
            request.prompt_tokens,
            request.output_tokens,
            timeout_ms=self._timeout_ms,
            unit_hashes=self._unit_hashes(request),
        )
        self._policy.apply(submitted, self._now_us)

    def _land(self, worker: TimedWorker) -> None:
        launch, report = worker.land()
        self._report(report, launch.sampled)
        self._stirred.add(worker.joined.worker)

    def _land_pull(self, worker: TimedWorker, pull: Pull) -> None:
        self._report(worker.land_pull(pull), ())

    def _report(self, report: Reported, sampled: tuple[Sampled, ...]) -> None:
        self._reports.append(sampled)
        numbered = msgspec.structs.replace(report, report=len(self._reports) - 1)
        self._policy.apply(numbered, self._now_us)

    # --- A turn ---

    def _turn(self) -> None:
        """Plans and what they bring about, until nothing more happens now."""
        while True:
            for command in self._policy.plan(self._now_us):
                match command:
                    case SendPlan():
                        self._send(command)
                    case EmitTokens():
                        self._emit(command)
                    case FinishRequest():
                        self._finish(command)
                    case RefuseRequest():
                        self._fate(command.request_id).ending = Ending.REFUSED
                    case Record(event=LogEvent.REQUEST_PREEMPTED, request_id=request_id):
                        assert request_id is not None
                        self._fate(request_id).preemption_count += 1
                    case Record(event=LogEvent.INTERNAL_ERROR):
                        raise FleetError(f"an internal error: {command.fields}")
                    case _:
                        pass
            self._reports.clear()
            if not self._step_workers():
                break
        self._wake_up()

    def _step_workers(self) -> bool:
        """Begin launches and pulls; True if some worker had to report without any."""
        stirred, self._stirred = sorted(self._stirred), set()
        has_reported = False
        for name in stirred:
            worker = self._workers[name]
            pulls, launch = worker.step(self._now_us)
            for pull in pulls:
                self._at(pull.end_us, partial(self._land_pull, worker, pull))
            if launch is not None:
                self._at(launch.end_us, partial(self._land, worker))
            elif (report := worker.idle_report()) is not None:
                self._report(report, ())
                has_reported = True
        return has_reported

    def _wake_up(self) -> None:
        """The policy wants a turn at some time, whatever happens until then."""
        wake_us = self._policy.wake_us
        if wake_us is not None and (
            self._wake_us is None or not self._now_us < self._wake_us <= wake_us
        ):
            self._wake_us = max(wake_us, self._now_us + 1)
            self._at(self._wake_us, lambda: None)

    def _send(self, plan: SendPlan) -> None:
        self._workers[plan.worker].receive(plan)
        self._stirred.add(plan.worker)
        for operation in plan.operations:
            if isinstance(operation, StartRow):
                self._fate(operation.request_id).has_begun = True

    def _emit(self, command: EmitTokens) -> None:
        for index, sampled in enumerate(self._reports[command.report]):
            if index in command.left_out:
                continue
            fate = self._fate(sampled.request_id)
            if fate.first_us is None:
                fate.first_us = sampled.first_us
            fate.last_us = sampled.last_us
            fate.token_count += sampled.count

    def _finish(self, command: FinishRequest) -> None:
        self._last_us = self._now_us
        fate = self._fate(command.request_id)
        if command.reason is EndReason.TIMEOUT and OWN_TIMEOUT in command.text:
            fate.ending = Ending.GIVEN_UP
        elif command.reason is EndReason.TIMEOUT:
            fate.ending = Ending.HUNG if fate.has_begun else Ending.TIMED_OUT
        elif command.reason is EndReason.LENGTH:
            fate.ending = Ending.COMPLETE
        else:
            fate.ending = Ending.ERROR

    def _fate(self, request_id: RequestId) -> Fate:
        return self._fates[int(request_id)]


def name_of(index: int) -> RequestId:
    """The request's name, by its number in the trace."""
    return RequestId(str(index))
