"""A worker's step loop: plans in, one launch, a report out.

1. All frames that have arrived are taken. A plan's operations are applied in their order:
   rows change, pages are pulled, all before the next launch.
2. One launch runs everything that is ready.
3. A report tells what it did. A plan is answered at once even if nothing was ready. Launches
   that follow one another within `REPORT_INTERVAL_S_MIN` share a report, unless it tells of an
   end, a chunk, a pull or a fault.
4. With nothing ready the loop waits for a frame, and reports now and then to show that it
   lives. It never spins.

No launch is in flight while a plan is applied, so all launches under earlier plans are over
then, and what the plan withdrew is free: `completed` equals `applied`.
"""

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NoReturn, assert_never

from tidegate.engine.failures import LinkBroken, WorkerRejected
from tidegate.engine.gathering import Gathered
from tidegate.engine.joining import WorkerLink, decode_frame
from tidegate.engine.row_start import BadOperation, checked_ids
from tidegate.engine.rows import RowTable
from tidegate.engine.runner import Runner
from tidegate.ipc.log import Log
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    Chunk,
    Fault,
    Fetch,
    FetchResult,
    Grow,
    Limit,
    Operation,
    Peer,
    PeerGone,
    Plan,
    PlanSeq,
    Poison,
    Report,
    RequestId,
    Row,
    Start,
    Stop,
    Trim,
    Welcome,
    WorkerRefused,
    encode,
    pack_ids,
)
from tidegate.ipc.transport.interface import PageTransport
from tidegate.kvcache.page_store import PageStore

# A launch that takes longer has a report of its own.
REPORT_INTERVAL_S_MIN = 0.002


class StepLoop:
    """The loop of one worker that has been welcomed."""

    def __init__(
        self,
        link: WorkerLink,
        table: RowTable,
        runner: Runner,
        store: PageStore,
        transport: PageTransport,
        welcome: Welcome,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._table = table
        self._runner = runner
        self._store = store
        self._transport = transport
        self._welcome = welcome
        self._log = log
        self._clock = clock
        self._applied = PlanSeq(0)
        self._launch = 0
        self._owes_answer = False
        self._fetched: list[FetchResult] = []
        self._gathered = Gathered()
        self._requests: dict[Row, RequestId] = {}  # Of the rows that are alive, for the log.
        self._reported_at = clock()

    def run(self, frames: Sequence[bytes] = ()) -> NoReturn:
        """Loop until an exception ends it; `frames` are those that have arrived already.

        Raises `WorkerRejected` when the scheduler sends the worker away, `LinkBroken` when it
        is gone or sends what cannot be, and `DeviceLost`.
        """
        self._take(frames)
        while True:
            self.step()

    def step(self) -> None:
        """Take what has arrived, launch once, report; wait if there was nothing to do."""
        if self._link.lost:
            # Plans may be missing; a new scheduler wants a worker with empty pools.
            raise LinkBroken("the connection to the scheduler was lost")
        self._take(self._link.receive_all())
        result = self._runner.launch()
        if result.row_count:
            self._launch += 1
            self._log.debug(
                LogEvent.LAUNCH,
                launch=self._launch,
                rows=result.row_count,
                tokens=result.token_count,
                starved=len(result.starved),
                busy_us=result.busy_us,
            )
        self._gathered.add(result)
        if self._must_report(is_pausing=not result.row_count):
            self._report()
        if not result.row_count:
            wait_s = max(0.0, self._reported_at + self._report_interval_s - self._clock())
            # Rounded up: a wait of less than it takes would make the loop spin.
            self._link.poll(int(wait_s * 1000) + 1)

    @property
    def _report_interval_s(self) -> float:
        """An idle worker shows at least so often that it lives."""
        return self._welcome.report_interval_ms / 1000

    def _must_report(self, *, is_pausing: bool) -> bool:
        since_s = self._clock() - self._reported_at
        if since_s >= self._report_interval_s:
            return True
        if self._gathered.is_urgent or self._table.has_news:
            return True
        has_news = self._owes_answer or not self._gathered.is_empty
        return has_news and (is_pausing or since_s >= REPORT_INTERVAL_S_MIN)

    def _take(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            match decode_frame(frame):
                case Plan() as plan:
                    self._apply(plan)
                case Welcome() as welcome:
                    # The answer to a `Hello` that was sent once more.
                    if welcome != self._welcome:
                        raise LinkBroken("the scheduler welcomed this worker twice")
                case WorkerRefused(reason=reason):
                    raise WorkerRejected(reason)

    def _apply(self, plan: Plan) -> None:
        if plan.seq != self._applied + 1:
            raise LinkBroken(f"plan {plan.seq} came after plan {self._applied}")
        for operation in plan.operations:
            self._apply_operation(operation)
        self._applied = plan.seq
        self._owes_answer = True
        if self._fetched:
            # The scheduler can go on with them while this launch runs.
            self._report()

    def _apply_operation(self, operation: Operation) -> None:
        match operation:
            case Start():
                self._requests[operation.row] = operation.request_id
                self._table.apply(operation)
                self._log.info(
                    LogEvent.ROW_STARTED,
                    request_id=operation.request_id,
                    row=operation.row,
                    position=operation.position,
                    tokens=len(operation.tokens) // 4,
                    output_index=operation.output_index,
                )
            case Stop():
                if operation.row in self._table:
                    self._log_end(operation.row, "stopped")
                self._table.apply(operation)
            case Chunk() | Grow() | Limit() | Trim():
                self._table.apply(operation)
            case Fetch():
                self._fetch(operation)
            case Peer():
                self._transport.attach(operation)
            case PeerGone():
                self._transport.detach(operation)
            case Poison():
                self._poison(operation)
            case _:
                assert_never(operation)

    def _fetch(self, fetch: Fetch) -> None:
        result = self._transport.fetch(fetch)
        self._fetched.append(result)
        log = self._log.warning if result.error else self._log.info
        log(
            LogEvent.FETCH_DONE,
            request_id=fetch.request_id,
            ticket=fetch.ticket,
            source=fetch.source_pool,
            length=fetch.length,
            bytes=result.byte_count,
            busy_us=result.busy_us,
            gb_per_s=round(result.byte_count / max(1, result.busy_us) / 1000, 3),
            error=result.error,
        )

    def _poison(self, poison: Poison) -> None:
        try:
            if not 0 <= poison.group < len(self._store.layout.groups):
                raise BadOperation(f"the layout has no group {poison.group}")
            count = self._store.geometry.page_counts[poison.group]
            self._store.poison(poison.group, checked_ids(poison.ids, count))
        except BadOperation as error:
            self._log.error(LogEvent.INTERNAL_ERROR, operation="poison", text=str(error))

    def _report(self) -> None:
        gathered, self._gathered = self._gathered, Gathered()
        for fault in self._table.take_faults():
            self._requests.pop(fault.row, None)
            self._log.error(
                LogEvent.ROW_FAULT,
                request_id=fault.request_id,
                row=fault.row,
                kind=fault.kind,
                text=fault.text,
            )
            self._link.send(encode(Fault(fault.row, fault.request_id, fault.kind, fault.text)))
        for end in gathered.ended:
            self._log_end(end.row, end.reason.value)
        report = Report(
            applied=self._applied,
            completed=self._applied,
            launch=self._launch,
            rows=pack_ids(gathered.tokens),
            counts=pack_ids(map(len, gathered.tokens.values())),
            tokens=pack_ids(chain.from_iterable(gathered.tokens.values())),
            ended=tuple(gathered.ended),
            chunks=tuple(gathered.chunks),
            fetched=tuple(self._fetched),
            starved=pack_ids(gathered.starved),
            busy_us=gathered.busy_us,
            trimmed=self._table.take_trimmed(),
        )
        self._link.send(encode(report))
        self._fetched = []
        self._owes_answer = False
        self._reported_at = self._clock()

    def _log_end(self, row: Row, reason: str) -> None:
        request_id = self._requests.pop(row)
        self._log.info(LogEvent.ROW_ENDED, request_id=request_id, row=row, reason=reason)
