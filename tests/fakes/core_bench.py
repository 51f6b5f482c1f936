"""The core on a bench: events in short form, commands without the records."""

from collections.abc import Mapping, Sequence

from tidegate.ipc.protocol import (
    ChunkDone,
    EndReason,
    FetchResult,
    Grow,
    Incarnation,
    PageRun,
    PlanSeq,
    PoolHandle,
    PoolId,
    RequestId,
    Role,
    Row,
    RowEnd,
    Ticket,
    Trimmed,
    WorkerId,
    pack_ids,
)
from tidegate.kvcache.layout import All, Group, Layout, TensorSpec, Tokens, Window
from tidegate.scheduler.commands import (
    Command,
    EmitTokens,
    FinishRequest,
    Record,
    SendPlan,
)
from tidegate.scheduler.core import Core
from tidegate.scheduler.events import (
    Cancelled,
    ClientId,
    Event,
    Reported,
    Submitted,
    WorkerJoined,
    WorkerLost,
)
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.state import Worker

P, D, B = WorkerId("p"), WorkerId("d"), WorkerId("b")
SPEC = TensorSpec("k", 0, (1,), "float32")
FULL_ONLY = Layout((Group("full", All(), Tokens(4), (SPEC,)),), None)
STALL_US = 10_000_000
QUEUE_US = 60_000_000


def hybrid(*, flag: bool = True, window: int = 6, page_tokens: int = 4) -> Layout:
    return Layout(
        (
            Group("full", All(), Tokens(page_tokens), (SPEC,)),
            Group("window", Window(Tokens(window)), Tokens(page_tokens), (SPEC,)),
        ),
        flag,
    )


HYBRID = hybrid()
SETTINGS = CoreSettings(
    chunk_tokens=Tokens(8),
    chunks_in_flight=1,
    ahead_tokens=Tokens(4),
    ahead_tokens_max=Tokens(4),
    stall_timeout_us=STALL_US,
    queue_timeout_us=QUEUE_US,
    early_handoff=False,  # Tests of it switch it on.
)


def joined(
    worker: WorkerId,
    role: Role,
    counts: Sequence[int],
    layout: Layout = HYBRID,
    *,
    rows: int = 4,
    incarnation: int = 1,
    context: int = 1000,
) -> WorkerJoined:
    return WorkerJoined(
        worker,
        role,
        PoolId(f"{worker}/{incarnation}"),
        Incarnation(incarnation),
        layout,
        context,
        handle(worker, counts),
        rows,
    )


def handle(worker: WorkerId, counts: Sequence[int]) -> PoolHandle:
    return PoolHandle("shared_memory", worker, 0, tuple(counts))


def submitted(
    name: str,
    prompt: int,
    output: int | None,
    *,
    client: str = "client",
    priority: int = 0,
    timeout_ms: int | None = None,
    hashes: Sequence[bytes] = (),
    tenant: str = "",
    total_timeout_ms: int | None = None,
    has_stop_text: bool = False,
) -> Submitted:
    return Submitted(
        RequestId(name),
        ClientId(client),
        prompt,
        output,
        priority,
        timeout_ms,
        tuple(hashes),
        tenant,
        total_timeout_ms,
        has_stop_text,
    )


def cancelled(name: str, kept: int = 0, reason: EndReason = EndReason.CANCELLED) -> Cancelled:
    return Cancelled(RequestId(name), kept, reason)


def lost(worker: WorkerId) -> WorkerLost:
    return WorkerLost(worker, "it was killed")


def report(
    worker: WorkerId,
    completed: int,
    *,
    chunks: Mapping[int, int] | None = None,
    tokens: Mapping[int, int] | None = None,
    ended: Mapping[int, EndReason] | None = None,
    fetched: Mapping[int, str] | None = None,
    trimmed: Mapping[int, Sequence[int]] | None = None,
    number: int = 0,
    busy_us: int = 0,
) -> Reported:
    """Mappings are from rows, and `fetched` from tickets, whose value is an error or empty."""
    sampled = tokens or {}
    return Reported(
        worker,
        number,
        PlanSeq(completed),
        PlanSeq(completed),
        pack_ids(sampled),
        pack_ids(sampled.values()),
        tuple(RowEnd(Row(row), reason) for row, reason in (ended or {}).items()),
        tuple(ChunkDone(Row(row), until) for row, until in (chunks or {}).items()),
        tuple(
            FetchResult(Ticket(ticket), error, 100, 5)
            for ticket, error in (fetched or {}).items()
        ),
        busy_us=busy_us,
        trimmed=tuple(
            Trimmed(Row(row), tuple(counts)) for row, counts in (trimmed or {}).items()
        ),
    )


def emitted(*first_indexes: int, report: int = 0, left_out: Sequence[int] = ()) -> EmitTokens:
    return EmitTokens(report, pack_ids(first_indexes), tuple(left_out))


def run(first_position: int, *ids: int) -> PageRun:
    return PageRun(first_position, pack_ids(ids))


def grow(row: int, group: int, *ids: int) -> Grow:
    return Grow(Row(row), group, pack_ids(ids))


class CoreBench:
    """A core that is checked after every call. Time stands still unless `now_us` is set."""

    def __init__(self, *workers: WorkerJoined, settings: CoreSettings = SETTINGS) -> None:
        self.core = Core(settings)
        self.now_us = 0
        self.records: list[Record] = []
        self.turn(*workers)
        for worker in self.core.fleet.workers.values():
            if worker.seq > worker.completed:  # It knows its peers now.
                self.apply(report(worker.worker_id, worker.seq))

    def apply(self, *events: Event) -> None:
        for event in events:
            self.core.apply(event, self.now_us)
            self.core.fleet.check()

    def turn(self, *events: Event) -> list[Command]:
        """Apply the events, and return the commands of one plan without the records."""
        self.apply(*events)
        commands = self.core.plan(self.now_us)
        self.core.check()
        records = [command for command in commands if isinstance(command, Record)]
        self.records += records
        return [command for command in commands if not isinstance(command, Record)]

    def worker(self, worker: WorkerId) -> Worker:
        return self.core.fleet.workers[worker]

    def free(self, worker: WorkerId) -> list[int]:
        """Pages of each pool that are free, or only cached."""
        pools = self.worker(worker).books.pools
        return [pool.free_count + pool.idle_count for pool in pools]

    def draining(self, worker: WorkerId) -> list[int]:
        return [pool.draining_count for pool in self.worker(worker).books.pools]

    def phase(self, name: str) -> Phase:
        request = self.core.fleet.requests.get(RequestId(name))
        return Phase.FINISHED if request is None else request.phase

    def row_of(self, name: str) -> Row:
        """The row of a request that has one."""
        (*_, seat) = self.core.fleet.requests[RequestId(name)].seats
        return seat.row

    # --- One request, up to some phase ---

    def prefill(self, name: str, prompt: int, output: int | None) -> None:
        """Submit a request that is alone on its worker, and run its prompt to the end."""
        self.turn(submitted(name, prompt, output))
        while self.phase(name) is Phase.PREFILLING:
            seat = self.core.fleet.requests[RequestId(name)].source
            assert seat is not None and seat.chunk_until is not None
            row, until = seat.row, seat.chunk_until
            is_last = until == prompt
            self.turn(
                report(
                    seat.worker.worker_id,
                    seat.worker.seq,
                    chunks={row: until},
                    tokens={row: 1} if is_last else None,
                    ended={row: EndReason.LENGTH} if is_last else None,
                )
            )

    def decode_whole(self, name: str, prompt: int, output: int) -> None:
        """Submit a request that B runs whole, and run its prompt in one chunk."""
        self.turn(submitted(name, prompt, output))
        row = self.row_of(name)
        self.turn(report(B, self.worker(B).seq, chunks={row: prompt}, tokens={row: 1}))

    def hand_over(self, name: str, prompt: int, output: int) -> list[Command]:
        """As `prefill`, and D answers the pull; returns the commands of that turn."""
        self.prefill(name, prompt, output)
        request = self.core.fleet.requests[RequestId(name)]
        assert request.ticket is not None
        return self.turn(report(D, self.worker(D).seq, fetched={request.ticket: ""}))


def plan_of(commands: Sequence[Command], worker: WorkerId) -> SendPlan:
    (plan,) = [c for c in commands if isinstance(c, SendPlan) and c.worker == worker]
    return plan


def finished(commands: Sequence[Command]) -> dict[str, FinishRequest]:
    return {c.request_id: c for c in commands if isinstance(c, FinishRequest)}
