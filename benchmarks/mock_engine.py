"""An engine without a model, for benchmarks: a plan is carried out as soon as it is read.

It keeps its rows in arrays and makes each report with a handful of array operations, so that
what a benchmark measures is the scheduler. A launch feeds every chunk that waits, and one
position of each row that decodes and has a page for it, as a real one does.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tidegate.ipc.protocol import (
    PROTOCOL_VERSION,
    Chunk,
    ChunkDone,
    EndReason,
    Fetch,
    FetchResult,
    Fingerprint,
    Grow,
    Hello,
    ModelCard,
    Plan,
    PlanSeq,
    PoolHandle,
    Report,
    Role,
    Row,
    RowEnd,
    Start,
    Stop,
    Trim,
    Trimmed,
    WorkerId,
)
from tidegate.kvcache.demand import Lengths
from tidegate.kvcache.layout import (
    All,
    Group,
    Layout,
    Pages,
    TensorSpec,
    Tokens,
    Window,
    token_capacity,
)

PAGE_TOKENS = Tokens(16)
WINDOW_TOKENS = Tokens(512)
VOCABULARY = 1000
CONTEXT_TOKENS = 1 << 20
ID_BYTES = 4

_SPEC = TensorSpec("k", 0, (1, 256), "bfloat16")
LAYOUT = Layout(
    (
        Group("full", All(), PAGE_TOKENS, (_SPEC,)),
        Group("window", Window(WINDOW_TOKENS), PAGE_TOKENS, (_SPEC,)),
    ),
    True,
)
CARD = ModelCard("mock", "llama", VOCABULARY, CONTEXT_TOKENS, b"{}", None, None, False, (1,))

Int64s = npt.NDArray[np.int64]
_ALWAYS: Callable[[], bool] = lambda: True  # noqa: E731


class MockEngine:
    """`row_count` rows that each have pages for the longest of `lengths`.

    Rows decode only while `may_decode` says so, so that a benchmark can begin with all of them.
    """

    def __init__(
        self,
        name: str,
        row_count: int,
        longest: Lengths,
        role: Role = Role.BOTH,
        may_decode: Callable[[], bool] = _ALWAYS,
    ) -> None:
        self.name = WorkerId(name)
        self.row_count = row_count
        # More than the longest need: rows may run ahead, and old pages come back late.
        counts = tuple(
            Pages(row_count * 2 * group.pages(longest.end)) for group in LAYOUT.groups
        )
        self.hello = Hello(
            PROTOCOL_VERSION,
            self.name,
            role,
            1,
            Fingerprint("mock", "bfloat16", LAYOUT),
            CARD,
            PoolHandle("memory", name, 0, counts),
            row_count,
        )
        self._may_decode = may_decode
        self._position: Int64s = np.zeros(row_count, np.int64)
        self._limit: Int64s = np.zeros(row_count, np.int64)
        self._reach: Int64s = np.zeros((len(LAYOUT.groups), row_count), np.int64)
        self._decodes: npt.NDArray[np.bool_] = np.zeros(row_count, np.bool_)
        self._chunks: list[Chunk] = []
        self._fetched: list[FetchResult] = []
        self._trimmed: list[Trimmed] = []
        self._applied = PlanSeq(0)
        self._owes_answer = False
        self._launch = 0

    @property
    def decoding_count(self) -> int:
        return int(self._decodes.sum())

    def apply(self, plan: Plan) -> None:
        for operation in plan.operations:
            match operation:
                case Start(row=row):
                    self._position[row] = operation.position
                    self._limit[row] = operation.limit
                    self._decodes[row] = (
                        operation.output_index > 0 and len(operation.tokens) == ID_BYTES
                    )
                    for group, run in enumerate(operation.pages):
                        self._reach[group, row] = run.first_position + _tokens_of(run.ids)
                case Chunk():
                    self._chunks.append(operation)
                case Grow():
                    self._reach[operation.group, operation.row] += _tokens_of(operation.ids)
                case Trim():
                    self._trim(operation)
                case Stop(row=row):
                    self._decodes[row] = False
                    self._chunks = [chunk for chunk in self._chunks if chunk.row != row]
                case Fetch():
                    self._fetched.append(FetchResult(operation.ticket, "", 1, 1))
                case _:
                    pass
        self._applied = plan.seq
        self._owes_answer = True

    def launch(self) -> Report | None:
        """Carry out what is there; None if that is nothing."""
        chunks, self._chunks = self._chunks, []
        sampled = [chunk.row for chunk in chunks if chunk.sample]
        ready = np.empty(0, np.int64)
        if self._may_decode():
            reach = np.minimum(self._reach.min(axis=0), self._limit)
            ready = np.flatnonzero(self._decodes & (self._position < reach))
            self._position[ready] += 1
        for chunk in chunks:
            self._position[chunk.row] = chunk.until
            self._decodes[chunk.row] = chunk.sample
        rows = np.concatenate((np.array(sampled, np.int64), ready))
        over = rows[self._position[rows] >= self._limit[rows]]
        self._decodes[over] = False
        if not rows.size and not chunks and not self._owes_answer:
            return None
        self._launch += 1
        self._owes_answer = False
        fetched, self._fetched = self._fetched, []
        trimmed, self._trimmed = self._trimmed, []
        return Report(
            applied=self._applied,
            completed=self._applied,
            launch=self._launch,
            rows=rows.astype("<u4").tobytes(),
            counts=np.ones(len(rows), "<u4").tobytes(),
            tokens=np.full(len(rows), 7, "<u4").tobytes(),
            ended=tuple(RowEnd(Row(row), EndReason.LENGTH) for row in over.tolist()),
            chunks=tuple(ChunkDone(chunk.row, chunk.until) for chunk in chunks),
            fetched=tuple(fetched),
            starved=b"",
            busy_us=0,
            trimmed=tuple(trimmed),
        )

    def _trim(self, trim: Trim) -> None:
        """Give up the pages of a row that hold nothing below `until`, nor what it feeds next.

        A row that has ended by itself tells nothing.
        """
        if not self._decodes[trim.row]:
            return
        keep = Tokens(max(trim.until, self._position.item(trim.row) + 1))
        counts: list[int] = []
        for index, group in enumerate(LAYOUT.groups):
            kept = group.pages(keep)
            reach = Tokens(self._reach[index].item(trim.row))
            counts.append(max(0, group.pages(reach) - kept))
            if counts[-1]:
                self._reach[index, trim.row] = token_capacity(kept, group.page_tokens)
        self._trimmed.append(Trimmed(trim.row, tuple(counts)))


def _tokens_of(page_ids: bytes) -> int:
    """How many positions these pages hold."""
    return token_capacity(Pages(len(page_ids) // ID_BYTES), PAGE_TOKENS)
