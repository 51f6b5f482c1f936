"""One launch after another: from ready rows to a batch, the model, the sampler, and back.

A failure stays with the row that causes it. When a launch fails, each of its rows runs alone
once, and those that fail alone too get a fault. A row with logits that are not finite gets
one without that.
"""

import time
from collections.abc import Sequence

import msgspec
import torch

from tidegate.engine.batch import Batch, RowPages, Segment
from tidegate.engine.failures import DeviceLost
from tidegate.engine.models.registry import Model
from tidegate.engine.rows import Feed, RowTable
from tidegate.engine.sampler import Draw, sample_finite
from tidegate.ipc.protocol import ChunkDone, Row, RowEnd
from tidegate.kvcache.page_store import PageStore

FAULT_TEXT_MAX = 300


class LaunchResult(msgspec.Struct, frozen=True):
    """What one launch did. `rows[i]` sampled `tokens[i]`, one token each.

    `row_count` and `token_count` say how much was fed; both are 0 if nothing was ready.
    """

    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    ended: tuple[RowEnd, ...]
    chunks: tuple[ChunkDone, ...]
    starved: tuple[Row, ...]
    row_count: int
    token_count: int
    busy_us: int


class _RowFailure(msgspec.Struct, frozen=True):
    kind: str
    text: str


_NOT_FINITE = _RowFailure("logits_not_finite", "the model gave logits that are not finite")

# What a feed gave: a token, nothing (it did not sample), or a failure.
_Outcome = int | None | _RowFailure


class Runner:
    """Runs the rows of `table` on `model`, whose keys and values are in `store`."""

    def __init__(self, model: Model, store: PageStore, table: RowTable) -> None:
        self._model = model
        self._store = store
        self._table = table

    def launch(self) -> LaunchResult:
        """Run all that is ready, once. When it returns, the device has finished.

        Failed rows are faults of the table. Raises `DeviceLost`.
        """
        begin_ns = time.perf_counter_ns()
        launch = self._table.next_launch()
        outcomes = self._run(launch.feeds) if launch.feeds else []
        rows: list[Row] = []
        tokens: list[int] = []
        ended: list[RowEnd] = []
        chunks: list[ChunkDone] = []
        for feed, outcome in zip(launch.feeds, outcomes, strict=True):
            if isinstance(outcome, _RowFailure):
                self._table.fault(feed.row, outcome.kind, outcome.text)
                continue
            end = self._table.settle(feed, outcome)
            if feed.is_chunk:
                chunks.append(ChunkDone(feed.row, feed.end))
            if outcome is not None:
                rows.append(feed.row)
                tokens.append(outcome)
            if end is not None:
                ended.append(end)
        return LaunchResult(
            rows=tuple(rows),
            tokens=tuple(tokens),
            ended=tuple(ended),
            chunks=tuple(chunks),
            starved=launch.starved,
            row_count=len(launch.feeds),
            token_count=sum(len(feed.tokens) for feed in launch.feeds),
            busy_us=(time.perf_counter_ns() - begin_ns) // 1000,
        )

    def _run(self, feeds: Sequence[Feed]) -> list[_Outcome]:
        try:
            return self._run_together(feeds)
        except Exception as error:
            self._check_device()
            if len(feeds) == 1:
                return [_failure(error)]
        return [outcome for feed in feeds for outcome in self._run([feed])]

    def _run_together(self, feeds: Sequence[Feed]) -> list[_Outcome]:
        batch = Batch.build(
            [_segment(feed) for feed in feeds], self._store.layout, self._store.device
        )
        logits = self._model.forward(batch, self._store)
        outcomes: list[_Outcome] = [None] * len(feeds)
        sampling = [index for index, feed in enumerate(feeds) if feed.sample]
        if sampling:
            draws = [Draw(feeds[i].sampling, feeds[i].output_index) for i in sampling]
            for index, token in zip(sampling, sample_finite(logits, draws), strict=True):
                outcomes[index] = _NOT_FINITE if token is None else token
        if self._store.device.type == "cuda":
            torch.cuda.synchronize(self._store.device)
        return outcomes

    def _check_device(self) -> None:
        """Raise `DeviceLost` if the error just caught has broken the device for good."""
        if self._store.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._store.device)
        except RuntimeError as error:
            raise DeviceLost(f"{self._store.device}: {_first_line(error)}") from error


def _segment(feed: Feed) -> Segment:
    return Segment(
        tokens=feed.tokens,
        start=feed.start,
        sample=feed.sample,
        pages=tuple(RowPages(run.first_page, run.ids) for run in feed.pages),
    )


def _failure(error: Exception) -> _RowFailure:
    return _RowFailure("model_failed", f"{type(error).__name__}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:FAULT_TEXT_MAX]
