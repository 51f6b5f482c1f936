"""A worker in virtual time: it applies plans as the wire protocol says, and its launches last.

1. Plans are applied between launches.
2. A launch with a chunk is one step: every row that is ready is fed, a prompt its chunk, a row
   that decodes one token. It lasts as long as the cost model says.
3. Without a chunk, rows decode step after step until `GATHER_US` have passed, and one report
   tells of them all, as workers gather theirs. Each token has the time of its own step.
4. Pulls run beside launches, one after another, at the speed of copies.

It has no pages: a row's page runs count only as far as they reach.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from cost_model import Costs, chunk_work, decode_work
from tidegate.ipc.protocol import (
    Chunk,
    ChunkDone,
    EndReason,
    Fetch,
    FetchResult,
    Grow,
    Incarnation,
    Limit,
    Peer,
    PeerGone,
    PlanSeq,
    Poison,
    PoolHandle,
    PoolId,
    RequestId,
    Role,
    Row,
    RowEnd,
    Stop,
    Trim,
    Trimmed,
    WorkerId,
    pack_ids,
)
from tidegate.kvcache.layout import Group, Layout, Pages, Tokens, token_capacity
from tidegate.scheduler.commands import SendPlan, StartRow
from tidegate.scheduler.events import Reported, WorkerJoined

GATHER_US = 5_000
ID_BYTES = 4  # Of a page id in a message.


class TimedRow:
    """A row as its worker knows it. `position` is the next one that is fed."""

    def __init__(self, start: StartRow, prompt_tokens: int, groups: Sequence[Group]) -> None:
        self.row = start.row
        self.request_id = start.request_id
        self.position = start.position
        self.limit = start.limit
        self.sits_out_at = start.limit
        self.chunks: deque[Chunk] = deque()
        known = prompt_tokens + start.output_index
        self.decodes = start.output_index > 0 and start.position == known - 1
        self.reaches = [
            run.first_position + tokens_of(run.ids, group)
            for run, group in zip(start.pages, groups, strict=True)
        ]

    @property
    def left(self) -> int:
        """How many positions it may decode with the pages that it has."""
        if not self.decodes:
            return 0
        return min(self.limit, self.sits_out_at, *self.reaches) - self.position


class Sampled(msgspec.Struct, frozen=True):
    """Tokens of one row in a report, and when the first and the last of them came."""

    request_id: RequestId
    count: int
    first_us: int
    last_us: int


class Launch(msgspec.Struct, frozen=True):
    """Under way until `end_us`; `sampled[i]` tells of the i-th row of the report."""

    applied: PlanSeq
    begin_us: int
    end_us: int
    rows: tuple[Row, ...]
    sampled: tuple[Sampled, ...]
    chunks: tuple[ChunkDone, ...]
    ended: tuple[RowEnd, ...]


class Pull(msgspec.Struct, frozen=True):
    fetch: Fetch
    applied: PlanSeq
    byte_count: int
    busy_us: int
    end_us: int


class TimedWorker:
    """One worker. Whoever drives it calls `step` after plans and landings."""

    def __init__(
        self, joined: WorkerJoined, costs: Costs, prompts: dict[RequestId, int]
    ) -> None:
        """`prompts` has the prompt's tokens of every request that it may be given."""
        self.joined = joined
        self.launch: Launch | None = None
        self.pulls: list[Pull] = []
        self.busy_us = 0  # In launches.
        self._costs = costs
        self._prompts = prompts
        self._groups = joined.layout.groups
        self._rows: dict[Row, TimedRow] = {}
        self._inbox: deque[SendPlan] = deque()
        self._trimmed: list[Trimmed] = []  # Since the last report.
        self._applied = PlanSeq(0)
        self._reported = PlanSeq(0)
        self._link_free_us = 0

    def receive(self, plan: SendPlan) -> None:
        self._inbox.append(plan)

    def step(self, now_us: int) -> tuple[list[Pull], Launch | None]:
        """Apply plans and begin a launch, if none is under way; returns what begins now."""
        if self.launch is not None:
            return [], None
        begun = len(self.pulls)
        while self._inbox:
            self._apply(self._inbox.popleft(), now_us)
        self.launch = self._make_launch(now_us)
        return self.pulls[begun:], self.launch

    def idle_report(self) -> Reported | None:
        """What there is to say without a launch: that plans are completed."""
        if self.launch is not None or self._completed() <= self._reported:
            return None
        return self._report()

    def land(self) -> tuple[Launch, Reported]:
        """The launch is over."""
        launch = self.launch
        assert launch is not None
        self.launch = None
        busy_us = launch.end_us - launch.begin_us
        self.busy_us += busy_us
        report = self._report(
            rows=pack_ids(launch.rows),
            counts=pack_ids([each.count for each in launch.sampled]),
            ended=launch.ended,
            chunks=launch.chunks,
            busy_us=busy_us,
        )
        return launch, report

    def land_pull(self, pull: Pull) -> Reported:
        self.pulls.remove(pull)
        result = FetchResult(pull.fetch.ticket, "", pull.byte_count, pull.busy_us)
        return self._report(fetched=(result,))

    # --- Plans ---

    def _apply(self, plan: SendPlan, now_us: int) -> None:
        assert plan.seq == self._applied + 1, "a plan is missing, or came twice"
        self._applied = plan.seq
        for operation in plan.operations:
            match operation:
                case StartRow(row=row, request_id=request_id):
                    assert row not in self._rows, "a row is begun twice"
                    prompt = self._prompts[request_id]
                    self._rows[row] = TimedRow(operation, prompt, self._groups)
                case Fetch():
                    self._begin_pull(operation, now_us)
                case Stop(row=row):
                    self._rows.pop(row, None)
                case Chunk() | Grow() | Limit() | Trim():
                    self._change(operation)
                case Peer() | PeerGone() | Poison():
                    pass

    def _change(self, operation: Chunk | Grow | Limit | Trim) -> None:
        row = self._rows.get(operation.row)
        if row is None:
            return  # It has ended by itself, which the scheduler did not know yet.
        match operation:
            case Chunk():
                row.chunks.append(operation)
            case Grow(group=group, ids=ids):
                row.reaches[group] += tokens_of(ids, self._groups[group])
            case Limit(limit=limit):
                row.sits_out_at = limit
            case Trim(until=until):
                self._trim(row, until)

    def _trim(self, row: TimedRow, until: int) -> None:
        """Give up the pages that hold nothing below `until`, nor the position fed next."""
        keep = Tokens(max(until, row.position + 1))
        counts: list[int] = []
        for index, group in enumerate(self._groups):
            reach, kept = Tokens(row.reaches[index]), group.pages(keep)
            counts.append(max(0, group.pages(reach) - kept))
            if counts[-1]:
                row.reaches[index] = group.start_of(kept)
        self._trimmed.append(Trimmed(row.row, tuple(counts)))

    def _begin_pull(self, fetch: Fetch, now_us: int) -> None:
        byte_count = sum(
            id_count(pulled.target_ids) * group.page_bytes
            for pulled, group in zip(fetch.groups, self._groups, strict=True)
        )
        busy_us = max(1, round(self._costs.copy_us(byte_count)))
        self._link_free_us = max(now_us, self._link_free_us) + busy_us
        self.pulls.append(Pull(fetch, self._applied, byte_count, busy_us, self._link_free_us))

    # --- Launches ---

    def _make_launch(self, now_us: int) -> Launch | None:
        waiting = [row for row in self._rows.values() if row.chunks]
        turn = min((row.chunks[0].turn for row in waiting), default=0)
        prompts = [row for row in waiting if row.chunks[0].turn == turn]
        decoding = [row for row in self._rows.values() if not row.chunks and row.left > 0]
        if prompts:
            return self._mixed(prompts, decoding, now_us)
        return self._decode(decoding, now_us) if decoding else None

    def _mixed(
        self, prompts: Sequence[TimedRow], decoding: Sequence[TimedRow], now_us: int
    ) -> Launch:
        """One step of chunks, and of a token for each row that decodes."""
        work = decode_work(len(decoding), sum(row.position + 1 for row in decoding))
        chunks: list[ChunkDone] = []
        samplers = list(decoding)
        for row in prompts:
            chunk = row.chunks.popleft()
            assert row.position < chunk.until <= min(row.limit, *row.reaches), "a wrong chunk"
            work += chunk_work(row.position, chunk.until, samples=chunk.sample)
            chunks.append(ChunkDone(row.row, chunk.until))
            row.position = chunk.until
            row.decodes = chunk.sample
            if chunk.sample:
                samplers.append(row)
        end_us = now_us + max(1, round(self._costs.us(work)))
        for row in decoding:
            row.position += 1
        fed = [(row, 1, end_us, end_us) for row in samplers]
        return self._launched(now_us, end_us, fed, tuple(chunks))

    def _decode(self, decoding: Sequence[TimedRow], now_us: int) -> Launch:
        """Steps until it is time to report, or no row can go on."""
        rows = sorted(decoding, key=lambda row: row.left)
        lefts = [row.left for row in rows]
        context = sum(row.position + 1 for row in rows)
        ends_us: list[int] = []
        elapsed_us, ready = 0.0, 0  # The rows from `ready` on go on.
        while ready < len(rows) and elapsed_us < GATHER_US:
            elapsed_us += self._costs.us(decode_work(len(rows) - ready, context))
            ends_us.append(now_us + max(1, round(elapsed_us)))
            context += len(rows) - ready
            while ready < len(rows) and lefts[ready] <= len(ends_us):
                context -= rows[ready].position + 1 + len(ends_us)
                ready += 1
        fed: list[tuple[TimedRow, int, int, int]] = []
        for row, left in zip(rows, lefts, strict=True):
            count = min(left, len(ends_us))
            row.position += count
            fed.append((row, count, ends_us[0], ends_us[count - 1]))
        return self._launched(now_us, ends_us[-1], fed, ())

    def _launched(
        self,
        now_us: int,
        end_us: int,
        fed: Sequence[tuple[TimedRow, int, int, int]],
        chunks: tuple[ChunkDone, ...],
    ) -> Launch:
        """The launch of these rows, each with its count of tokens and the times of two."""
        ended: list[RowEnd] = []
        for row, *_ in fed:
            if row.position >= row.limit:
                ended.append(RowEnd(row.row, EndReason.LENGTH))
                del self._rows[row.row]
        return Launch(
            self._applied,
            now_us,
            end_us,
            tuple(row.row for row, *_ in fed),
            tuple(Sampled(row.request_id, *times) for row, *times in fed),
            chunks,
            tuple(ended),
        )

    # --- Reports ---

    def _completed(self) -> PlanSeq:
        """All launches and pulls that were begun before this plan was applied are over."""
        under_way = [pull.applied for pull in self.pulls]
        if self.launch is not None:
            under_way.append(self.launch.applied)
        return max(self._reported, min(under_way, default=self._applied))

    def _report(
        self,
        *,
        rows: bytes = b"",
        counts: bytes = b"",
        ended: tuple[RowEnd, ...] = (),
        chunks: tuple[ChunkDone, ...] = (),
        fetched: tuple[FetchResult, ...] = (),
        busy_us: int = 0,
    ) -> Reported:
        self._reported = self._completed()
        trimmed, self._trimmed = tuple(self._trimmed), []
        return Reported(
            self.joined.worker,
            0,  # Whoever drives it numbers the reports of a turn.
            self._applied,
            self._reported,
            rows,
            counts,
            ended,
            chunks,
            fetched,
            busy_us=busy_us,
            trimmed=trimmed,
        )


def join_worker(
    name: str,
    role: Role,
    number: int,
    layout: Layout,
    page_counts: Sequence[Pages],
    row_count: int,
    context: int,
) -> WorkerJoined:
    """The event of a worker with these pools, without any memory behind them."""
    handle = PoolHandle("none", name, 0, tuple(page_counts))
    pool, incarnation = PoolId(name), Incarnation(number + 1)
    return WorkerJoined(
        WorkerId(name), role, pool, incarnation, layout, context, handle, row_count
    )


def id_count(ids: bytes) -> int:
    """How many page ids these are."""
    return len(ids) // ID_BYTES


def tokens_of(ids: bytes, group: Group) -> int:
    """How many positions these pages hold."""
    return token_capacity(Pages(id_count(ids)), group.page_tokens)
