"""A scheduler without sockets: the real core, its commands carried out, every answer judged.

It does what the shell does, turn by turn, and checks after each event and plan what must
always hold.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import assert_never

from simulation.early_seats import PullChecks, check_nobody_waits
from simulation.fake_worker import FakeWorker
from simulation.judge import Judge
from simulation.liveness import Liveness
from simulation.memory import SimulationError
from simulation.reference import may_ever_run
from simulation.scripts import STOP_TOKEN, Script, script_of
from simulation.shares import Shares
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    EndReason,
    Fault,
    Fetch,
    Plan,
    Report,
    RequestId,
    Row,
    Sampling,
    Start,
    WaitKind,
    WorkerId,
    pack_ids,
    unpack_ids,
)
from tidegate.kvcache.units import unit_tokens
from tidegate.scheduler.commands import (
    AcceptRequest,
    Command,
    EmitTokens,
    FenceWorker,
    FinishRequest,
    Record,
    RefuseRequest,
    SendPlan,
    StartRow,
)
from tidegate.scheduler.core import Core
from tidegate.scheduler.events import (
    Cancelled,
    ClientGone,
    ClientId,
    Event,
    ReaderChanged,
    Reported,
    RowFaulted,
    Submitted,
    WorkerJoined,
    WorkerLost,
)
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.waits import Explainer

CONTEXT = 1_000_000
ASKED_COUNT = 4  # Requests that are asked after each plan what they wait for.


class Desk:
    """Turns in, plans out. `trace`, if given, is called with each event and command."""

    def __init__(
        self,
        settings: CoreSettings,
        scripts: dict[int, Script],
        trace: Callable[[object], None] | None = None,
        *,
        checks: bool = True,
    ) -> None:
        self.core = Core(settings)
        self.judge = Judge()
        self.shares = Shares(
            settings.tenant_weights, settings.bypass_count_max, settings.bypass_tokens_max
        )
        self.liveness = Liveness()
        self.records: dict[LogEvent, int] = {}
        self.expects_ranks = True  # Whoever gives way has the lowest rank.
        self.restart_count = 0  # Of requests that have ended.
        self.given_back_count = 0  # Pages that rows held ahead, and gave back.
        self.cached_tokens = 0
        self.pulls = PullChecks(scripts)
        self.on_fence: Callable[[WorkerId], None] = lambda _: None
        self._scripts = scripts
        self._living: set[RequestId] = set()
        self._may_run: dict[RequestId, bool] = {}
        self._overload: dict[RequestId, str] = {}  # With what code each is to be refused.
        self._reports: list[tuple[WorkerId, Report]] = []
        self._rows: dict[tuple[WorkerId, Row], RequestId] = {}  # Whom they were begun for.
        self._trace = trace
        self._checks = checks

    # --- Events ---

    def join(self, worker: FakeWorker, now_us: int) -> None:
        self.pulls.join(worker)
        joined = WorkerJoined(
            worker.worker,
            worker.role,
            worker.pool,
            worker.incarnation,
            worker.layout,
            CONTEXT,
            worker.handle,
            worker.row_count,
        )
        self.apply(joined, now_us)

    def lose(self, worker: WorkerId, reason: str, now_us: int) -> None:
        self.apply(WorkerLost(worker, reason), now_us)

    def submit(self, script: Script, client: str, now_us: int) -> None:
        self.judge.submit(script, now_us)
        self._living.add(script.request_id)
        self._may_run[script.request_id] = may_ever_run(
            [
                (worker.role, worker.layout, worker.books.page_counts)
                for worker in self.core.fleet.healthy()
            ],
            script,
            self.core.fleet.settings.default_max_tokens,
        )
        self._overload[script.request_id] = self._overload_of(script)
        submitted = Submitted(
            script.request_id,
            ClientId(client),
            script.prompt_tokens,
            script.max_tokens,
            script.priority,
            script.timeout_ms,
            self._unit_hashes(script),
            script.tenant,
            script.total_timeout_ms,
            script.has_stop_text,
        )
        self.apply(submitted, now_us)

    def _overload_of(self, script: Script) -> str:
        """With what code the queue has no room for the request; empty if it has."""
        settings = self.core.fleet.settings
        waiting = [
            script_of(request.request_id, self._scripts)
            for request in self.core.fleet.requests.values()
            if request.phase is Phase.WAITING
        ]
        mine = [other for other in waiting if other.tenant == script.tenant]
        for code, others, count_max, tokens_max in (
            (
                "tenant_queue_full",
                mine,
                settings.tenant_waiting_count_max,
                settings.tenant_waiting_tokens_max,
            ),
            ("queue_full", waiting, settings.waiting_count_max, settings.waiting_tokens_max),
        ):
            tokens = sum(other.prompt_tokens for other in [*others, script])
            if len(others) >= (count_max or len(others) + 1) or (
                others and tokens > (tokens_max or tokens)
            ):
                return code
        return ""

    def _unit_hashes(self, script: Script) -> tuple[bytes, ...]:
        layouts = [worker.layout for worker in self.core.fleet.workers.values()]
        return script.unit_hashes(unit_tokens(layouts[0])) if layouts else ()

    def cancel(self, request_id: RequestId, kept: int, now_us: int) -> None:
        self.judge.cancel(request_id)
        if request_id in self._living:
            self.apply(Cancelled(request_id, kept, EndReason.CANCELLED), now_us)

    def reader(self, client: str, now_us: int, *, is_behind: bool) -> None:
        self.apply(ReaderChanged(ClientId(client), is_behind), now_us)

    def client_gone(self, client: str, now_us: int) -> None:
        for request_id in self.core.fleet.by_client.get(ClientId(client), ()):
            self.judge.cancel(request_id)
        self.apply(ClientGone(ClientId(client), "it went away"), now_us)

    def report(self, worker: WorkerId, report: Report, now_us: int) -> None:
        self._reports.append((worker, report))
        self.pulls.answered(self.core.fleet, worker, report)
        self.given_back_count += sum(sum(t.page_counts) for t in report.trimmed)
        reported = Reported(
            worker,
            len(self._reports) - 1,
            report.applied,
            report.completed,
            report.rows,
            report.counts,
            report.ended,
            report.chunks,
            report.fetched,
            busy_us=report.busy_us,
            trimmed=report.trimmed,
        )
        self.apply(reported, now_us)

    def fault(self, worker: WorkerId, fault: Fault, now_us: int) -> None:
        event = RowFaulted(worker, fault.row, fault.request_id, fault.kind, fault.text)
        self.apply(event, now_us)

    def apply(self, event: Event, now_us: int) -> None:
        if self._trace is not None:
            self._trace(event)
        self.core.apply(event, now_us)
        if self._checks:
            self.core.fleet.check()

    # --- Plans ---

    def plan(self, now_us: int) -> list[tuple[WorkerId, Plan]]:
        """Ends the turn: carries out all commands; returns the plans to send."""
        plans: list[tuple[WorkerId, Plan]] = []
        for command in self.core.plan(now_us):
            if self._trace is not None:
                self._trace(command)
            self._carry_out(command, plans, now_us)
        self._reports.clear()
        self.judge.check_deadlines(now_us)
        if self._checks:
            self.core.check()
            self._check_waits()
            check_nobody_waits(self.core.fleet)
        self._check_progress(now_us)
        return plans

    def _carry_out(
        self, command: Command, plans: list[tuple[WorkerId, Plan]], now_us: int
    ) -> None:
        match command:
            case SendPlan():
                operations = tuple(
                    self._start(command.worker, operation)
                    if isinstance(operation, StartRow)
                    else operation
                    for operation in command.operations
                )
                for operation in operations:
                    if isinstance(operation, Fetch):
                        self.pulls.sent(operation)
                plans.append((command.worker, Plan(command.seq, operations)))
            case FenceWorker(worker=worker):
                self.on_fence(worker)
            case AcceptRequest(request_id=request_id):
                if not self._may_run[request_id]:
                    raise SimulationError(f"{request_id} can never run, and was accepted")
                if self._overload[request_id]:
                    raise SimulationError(f"{request_id} was accepted into a full queue")
                self.judge.accept(command)
                script = script_of(request_id, self._scripts)
                self.shares.accept(script, command.max_tokens)
            case RefuseRequest(request_id=request_id, code=code):
                self._living.remove(request_id)
                if self._may_run[request_id] and code != self._overload[request_id]:
                    raise SimulationError(f"{request_id} could run, but: {command.text}")
                if code == self._overload[request_id] and not command.retry_after_ms:
                    raise SimulationError(f"{request_id} is not told when to come back")
                self.judge.refuse(command)
            case EmitTokens():
                self._emit(command)
            case FinishRequest():
                self._living.remove(command.request_id)
                self.judge.finish(command, now_us)
                self.cached_tokens += command.usage.cached_tokens
            case Record(event=event):
                self.records[event] = self.records.get(event, 0) + 1
                if event is LogEvent.INTERNAL_ERROR:
                    raise SimulationError(f"an internal error: {command.fields}")
                if event is LogEvent.REQUEST_PREEMPTED and self.expects_ranks:
                    self.liveness.preempted(command, self.core.fleet, self.judge.streams)
                self._note_service(command)
            case _:
                assert_never(command)

    def _note_service(self, record: Record) -> None:
        """What the log tells of a request's service when it begins, and when it ends."""
        if record.event is LogEvent.REQUEST_ADMITTED:
            assert record.request_id is not None
            script = script_of(record.request_id, self._scripts)
            output, cached = number(record, "output_tokens"), number(record, "cached_tokens")
            passed = record.fields.get("passed")
            self.shares.begin(script, output, cached, None if passed is None else str(passed))
            request = self.core.fleet.requests.get(record.request_id)
            if request is not None:
                self.liveness.admitted(request)
        elif record.event is LogEvent.REQUEST_FINISHED:
            assert record.request_id is not None
            self.restart_count += number(record, "restarts")
            self.shares.finish(record.request_id, number(record, "charged_tokens"))

    def _emit(self, command: EmitTokens) -> None:
        worker, report = self._reports[command.report]
        rows, counts = unpack_ids(report.rows), unpack_ids(report.counts)
        tokens = deque(unpack_ids(report.tokens))
        for index, first_index in enumerate(unpack_ids(command.first_indexes)):
            mine = [tokens.popleft() for _ in range(counts[index])]
            if index not in command.left_out:
                request_id = self._rows[worker, Row(rows[index])]
                self.judge.emit(request_id, first_index, mine)
                self.shares.emit(request_id, len(mine))

    def _start(self, worker: WorkerId, row: StartRow) -> Start:
        """The shell's join: it knows the tokens of living requests only."""
        if row.request_id not in self._living:
            raise SimulationError(f"{row.request_id} is started, and has ended")
        self._rows[worker, row.row] = row.request_id
        script = script_of(row.request_id, self._scripts)
        prompt = range(row.position, script.prompt_tokens)
        output = self.judge.streams[row.request_id].tokens
        tokens = [script.prompt_token(position) for position in prompt]
        tokens += output[max(0, row.position - script.prompt_tokens) :]
        return Start(
            row.row,
            row.request_id,
            row.position,
            pack_ids(tokens),
            row.output_index,
            row.limit,
            row.pages,
            Sampling(),
            stop_ids=pack_ids([STOP_TOKEN]),
            ignore_eos=False,
        )

    def _check_waits(self) -> None:
        """Each request can be told what it waits for, and it is nothing that is there."""
        explainer = Explainer(self.core.fleet)
        for request in islice(self.core.fleet.requests.values(), ASKED_COUNT):
            found = explainer.explain(request)
            if found.kind is WaitKind.TURN and found.first is None:
                raise SimulationError(f"{request.request_id} waits, and it is its turn")
            if found.pool and found.pages_short <= 0:
                raise SimulationError(f"{request.request_id} waits for no page: {found}")

    def _check_progress(self, now_us: int) -> None:
        """Nothing waits while nothing is under way, and the core will wake up in time."""
        fleet = self.core.fleet
        if fleet.requests and not any(worker.is_working for worker in fleet.healthy()):
            raise SimulationError("requests wait, and nothing is under way")
        wake_us = self.core.wake_us
        if wake_us is not None and wake_us <= now_us:
            raise SimulationError("the core asks to be woken up in the past")
        if fleet.requests and wake_us is None:
            raise SimulationError("requests are alive without any deadline")


def number(record: Record, field: str) -> int:
    value = record.fields[field]
    assert isinstance(value, int)
    return value
