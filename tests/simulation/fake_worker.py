"""A worker without a model: it applies plans as the wire protocol says, on pages that remember.

1. Plans are applied between launches. A wrong operation is a `SimulationError`.
2. A launch writes its positions when it is made and again when it lands, as a device may do
   so at any moment in between, and checks all that its queries read at both moments.
3. A pull copies when it lands. Until then its plan is not completed.

Rows run ahead of the scheduler as far as their pages reach. With `depth` 2 a launch is made
before the one before it has landed, so that a row that ends by itself is in one launch more.
"""

from collections import deque
from collections.abc import Callable, Sequence

from simulation.memory import Memory, Run, SimulationError, covered
from simulation.scripts import END_TOKEN, STOP_TOKEN, Script, script_of
from tidegate.ipc.protocol import (
    Chunk,
    ChunkDone,
    EndReason,
    Fault,
    Fetch,
    FetchResult,
    Grow,
    Incarnation,
    Limit,
    Peer,
    PeerGone,
    Plan,
    PlanSeq,
    Poison,
    PoolHandle,
    PoolId,
    Report,
    Role,
    Row,
    RowEnd,
    Start,
    Stop,
    Trim,
    Trimmed,
    WorkerId,
    pack_ids,
    unpack_ids,
)
from tidegate.kvcache.layout import Group, Layout, Tail, Tokens

PoolKey = tuple[PoolId, Incarnation]


class FakeRow:
    """A row as its worker knows it. `position` is the next one that a launch may feed."""

    def __init__(self, start: Start, script: Script) -> None:
        self.row = start.row
        self.script = script
        self.position = start.position
        self.output_index = start.output_index
        self.known_end = script.prompt_tokens + start.output_index  # At the start.
        self.limit = start.limit
        self.sits_out_at = start.limit
        self.runs: list[Run] = []
        self.chunks: deque[Chunk] = deque()
        self.decodes = start.output_index > 0 and start.position == self.known_end - 1
        self.is_gone = False


class Feed:
    """A row's part of a launch: positions [start, end), and `count` tokens sampled."""

    def __init__(self, row: FakeRow, end: int, count: int, is_chunk: bool) -> None:
        self.row = row
        self.start = row.position
        self.end = end
        self.count = count
        self.is_chunk = is_chunk
        self.output_index = row.output_index
        self.runs = [run.copy() for run in row.runs]


class Launch:
    def __init__(self, feeds: list[Feed], applied: PlanSeq) -> None:
        self.feeds = feeds
        self.applied = applied


class Pull:
    def __init__(self, fetch: Fetch, source: Memory, applied: PlanSeq) -> None:
        self.fetch = fetch
        self.source = source
        self.applied = applied


class FakeWorker:
    """One life of a worker's process. `steps_max` tokens are decoded in one launch at most."""

    def __init__(
        self,
        worker: WorkerId,
        role: Role,
        layout: Layout,
        page_counts: Sequence[int],
        row_count: int,
        incarnation: Incarnation,
        memories: dict[PoolKey, Memory],
        scripts: dict[int, Script],
        *,
        steps_max: int = 1,
        depth: int = 1,
        is_cautious: bool = False,
    ) -> None:
        self.worker = worker
        self.role = role
        self.layout = layout
        self.row_count = row_count
        self.incarnation = incarnation
        self.pool = PoolId(f"{worker}/{incarnation}")
        self.memory = Memory(layout, page_counts)
        self.handle = PoolHandle("memory", self.pool, 0, tuple(page_counts))
        self.steps_max = steps_max
        self.depth = depth
        self.is_cautious = is_cautious
        self.rows: dict[Row, FakeRow] = {}
        self.launches: deque[Launch] = deque()
        self.pulls: dict[int, Pull] = {}
        self.applied = PlanSeq(0)
        self.faults: list[Fault] = []
        self.trimmed: list[Trimmed] = []
        self._inbox: deque[Plan] = deque()
        self._memories = memories
        self._memories[self.pool, self.incarnation] = self.memory
        self._scripts = scripts
        self._peers: dict[PoolId, Incarnation] = {}
        self._launch_count = 0
        self._completed = PlanSeq(0)

    @property
    def completed(self) -> PlanSeq:
        """All launches and pulls begun before this plan was applied are over.

        A cautious worker waits for those under the plan itself as well.
        """
        under_way = [launch.applied for launch in self.launches]
        under_way += [pull.applied for pull in self.pulls.values()]
        completed = min(under_way, default=self.applied)
        if under_way and self.is_cautious:
            completed = PlanSeq(completed - 1)
        self._completed = max(self._completed, completed)
        return self._completed

    # --- Plans ---

    def receive(self, plan: Plan) -> None:
        self._inbox.append(plan)

    def apply_plans(self) -> list[Pull]:
        """Apply the plans that have arrived; returns the pulls that begin now."""
        pulls: list[Pull] = []
        while self._inbox:
            plan = self._inbox.popleft()
            _require(plan.seq == self.applied + 1, "a plan is missing, or came twice")
            self.applied = plan.seq
            for operation in plan.operations:
                match operation:
                    case Fetch():
                        pulls.append(self._begin_pull(operation))
                    case Peer(pool=pool, incarnation=incarnation):
                        self._peers[pool] = incarnation
                    case PeerGone(pool=pool, incarnation=incarnation):
                        _require(self._peers.pop(pool, None) == incarnation, "unknown peer")
                    case Poison(group=group, ids=ids):
                        self.memory.poison(group, unpack_ids(ids))
                    case Start() | Chunk() | Grow() | Limit() | Trim() | Stop():
                        self.apply_to_row(operation)
        return pulls

    def apply_to_row(self, operation: Start | Chunk | Grow | Limit | Trim | Stop) -> None:
        if isinstance(operation, Start):
            self._start(operation)
        else:
            self._change_row(operation)

    def _start(self, start: Start) -> None:
        _require(start.row not in self.rows, f"row {start.row} is in use")
        _require(0 <= start.row < self.row_count, f"there is no row {start.row}")
        _require(start.position < start.limit, "a row starts at its limit")
        row = FakeRow(start, script_of(start.request_id, self._scripts))
        _require(unpack_ids(start.tokens) == _tokens_to_feed(row), "wrong tokens to feed")
        for index, (group, pages) in enumerate(
            zip(self.layout.groups, start.pages, strict=True)
        ):
            first, rest = divmod(pages.first_position, group.page_tokens)
            _require(rest == 0, "a page run begins inside a page")
            run = Run(first, unpack_ids(pages.ids))
            row.runs.append(run)
            needed = group.first_needed(Tokens(start.position))
            self.memory.expect(index, run, row.script, needed, start.position)
        self.rows[start.row] = row

    def _change_row(self, operation: Chunk | Grow | Limit | Trim | Stop) -> None:
        row = self.rows.get(operation.row)
        if row is None:
            return  # It has ended by itself, which the scheduler did not know yet.
        match operation:
            case Chunk(until=until, sample=sample):
                begin = row.chunks[-1].until if row.chunks else row.position
                _require(not row.decodes and begin < until <= row.known_end, "a wrong chunk")
                _require(sample == (until == row.known_end), "a chunk samples at its end")
                waiting = [chunk.turn for other in self.rows.values() for chunk in other.chunks]
                _require(operation.turn >= max(waiting, default=0), "a turn comes too late")
                row.chunks.append(operation)
            case Grow(group=group, ids=ids):
                row.runs[group].ids.extend(unpack_ids(ids))
            case Limit(limit=limit):
                row.sits_out_at = limit
            case Trim(until=until):
                _require(row.decodes, "pages of a row that does not decode are asked back")
                self.trimmed.append(self._trim(row, until))
            case Stop():
                self._forget(row)

    def _trim(self, row: FakeRow, until: int) -> Trimmed:
        keep_to = max(until, row.position + 1)
        counts: list[int] = []
        for group, run in zip(self.layout.groups, row.runs, strict=True):
            kept = max(0, -(-keep_to // group.page_tokens) - run.first)
            counts.append(len(run.ids[kept:]))
            del run.ids[kept:]
        return Trimmed(row.row, tuple(counts))

    def _forget(self, row: FakeRow) -> None:
        row.is_gone = True
        del self.rows[row.row]

    # --- Launches ---

    @property
    def is_ready(self) -> bool:
        """Some row could be fed."""
        groups = self.layout.groups
        return any(
            row.chunks
            or (
                row.decodes
                and row.position < min(row.limit, row.sits_out_at, covered(groups, row.runs))
            )
            for row in self.rows.values()
        )

    def make_launch(self, takes: Callable[[FakeRow], bool] = lambda _: True) -> Launch | None:
        """Feed the rows that are ready and that `takes` lets in; None if there is none."""
        if len(self.launches) >= self.depth:
            return None
        heads = (row.chunks[0].turn for row in self.rows.values() if row.chunks)
        turn = min(heads, default=0)
        feeds = [
            feed
            for row in self.rows.values()
            if takes(row) and (feed := self._feed(row, turn)) is not None
        ]
        if not feeds:
            return None
        for feed in feeds:
            feed.row.position = feed.end
            feed.row.output_index += feed.count
            self._write(feed)
            self._expect_reads(feed)
        launch = Launch(feeds, self.applied)
        self.launches.append(launch)
        return launch

    def _feed(self, row: FakeRow, turn: int) -> Feed | None:
        reach = covered(self.layout.groups, row.runs)
        if row.chunks and row.chunks[0].turn > turn:
            return None
        if row.chunks:
            chunk = row.chunks.popleft()
            _require(chunk.until <= min(reach, row.limit), "a chunk beyond pages or limit")
            row.decodes = chunk.sample
            return Feed(row, chunk.until, int(chunk.sample), is_chunk=True)
        end = min(reach, row.limit, row.sits_out_at, row.position + self.steps_max)
        if not row.decodes or end <= row.position:
            return None
        return Feed(row, end, end - row.position, is_chunk=False)

    def land(self, fault: Callable[[FakeRow], bool] = lambda _: False) -> Report:
        """The oldest launch is over; rows for which `fault` holds fail instead."""
        launch = self.launches.popleft()
        rows: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        ended: list[RowEnd] = []
        chunks: list[ChunkDone] = []
        for feed in launch.feeds:
            self._expect_reads(feed)
            self._write(feed)
            row = feed.row
            if row.is_gone:
                continue
            if fault(row):
                self._forget(row)
                request_id = row.script.request_id
                self.faults.append(Fault(row.row, request_id, "device", "it failed"))
                continue
            if feed.is_chunk:
                chunks.append(ChunkDone(row.row, feed.end))
            sampled, reason = _sample(feed)
            if sampled:
                rows.append(row.row)
                counts.append(len(sampled))
                tokens += sampled
            if reason is not None:
                ended.append(RowEnd(row.row, reason))
                self._forget(row)
        return self.report(rows, counts, tokens, ended, chunks)

    def report(
        self,
        rows: Sequence[int] = (),
        counts: Sequence[int] = (),
        tokens: Sequence[int] = (),
        ended: Sequence[RowEnd] = (),
        chunks: Sequence[ChunkDone] = (),
        fetched: Sequence[FetchResult] = (),
    ) -> Report:
        self._launch_count += 1
        trimmed, self.trimmed = tuple(self.trimmed), []
        return Report(
            applied=self.applied,
            completed=self.completed,
            launch=self._launch_count,
            rows=pack_ids(rows),
            counts=pack_ids(counts),
            tokens=pack_ids(tokens),
            ended=tuple(ended),
            chunks=tuple(chunks),
            fetched=tuple(fetched),
            starved=b"",
            busy_us=0,
            trimmed=trimmed,
        )

    def _write(self, feed: Feed) -> None:
        for index, (group, run) in enumerate(zip(self.layout.groups, feed.runs, strict=True)):
            first = _written_from(group, feed)
            self.memory.write(index, run, feed.row.script, first, feed.end)

    def _expect_reads(self, feed: Feed) -> None:
        """Every query at q in [start, end) finds [first_needed(q), q] of each group."""
        script = feed.row.script
        for index, (group, run) in enumerate(zip(self.layout.groups, feed.runs, strict=True)):
            needed = group.first_needed(Tokens(feed.start))
            self.memory.expect(index, run, script, needed, feed.start)
            self.memory.expect(index, run, script, _written_from(group, feed), feed.end)

    # --- Pulls ---

    def _begin_pull(self, fetch: Fetch) -> Pull:
        _require(fetch.ticket not in self.pulls, "a ticket is used twice")
        known = self._peers.get(fetch.source_pool)
        _require(known == fetch.source_incarnation, "a pull from an unknown pool")
        source = self._memories[fetch.source_pool, fetch.source_incarnation]
        pull = Pull(fetch, source, self.applied)
        self.pulls[fetch.ticket] = pull
        return pull

    def land_pull(self, pull: Pull, error: str = "") -> Report:
        """The pull is over; with an error, some of its pages may have been copied."""
        fetch = pull.fetch
        byte_count = 0
        for index, group in enumerate(fetch.groups):
            source_ids = unpack_ids(group.source_ids)
            target_ids = unpack_ids(group.target_ids)
            if error:
                source_ids, target_ids = source_ids[:1], target_ids[:1]
            self.memory.copy_from(pull.source, index, source_ids, target_ids)
            byte_count += len(target_ids) * self.layout.groups[index].page_bytes
        del self.pulls[fetch.ticket]
        result = FetchResult(fetch.ticket, error, 0 if error else byte_count, 1)
        return self.report(fetched=(result,))


def _written_from(group: Group, feed: Feed) -> int:
    """Of a tail group a launch leaves only what its end still needs."""
    if isinstance(group.reach, Tail):
        return max(feed.start, group.first_needed(Tokens(feed.end)))
    return feed.start


def _tokens_to_feed(row: FakeRow) -> tuple[int, ...]:
    """What a row knows when it starts: its prompt and tokens so far, from its position on."""
    script = row.script
    _require(row.position < row.known_end, "a token is lost or twice")
    return tuple(
        script.prompt_token(n)
        if n < script.prompt_tokens
        else script.token(n - script.prompt_tokens)
        for n in range(row.position, row.known_end)
    )


def _sample(feed: Feed) -> tuple[list[int], EndReason | None]:
    """The tokens of the feed up to the row's end, and why it ends there, if it does."""
    script = feed.row.script
    tokens: list[int] = []
    for index in range(feed.output_index, feed.output_index + feed.count):
        tokens.append(script.token(index))
        if tokens[-1] == END_TOKEN:
            return tokens, EndReason.END_TOKEN
        if tokens[-1] == STOP_TOKEN:
            return tokens, EndReason.STOP_ID
    is_last = feed.count > 0 and feed.end >= feed.row.limit
    return tokens, EndReason.LENGTH if is_last else None


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise SimulationError(text)
