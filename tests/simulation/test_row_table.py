"""The engine's row table beside the fake worker: the same plans give the same launches.

So what the simulator shows of the core holds for the real worker's side of the protocol too.
"""

from collections.abc import Callable, Sequence
from typing import Any

from simulation.fake_worker import FakeRow, FakeWorker, Launch
from simulation.scenario import draw
from simulation.scripts import END_TOKEN, VOCABULARY
from simulation.simulator import Simulator
from tidegate.engine.rows import RowTable
from tidegate.ipc.protocol import Chunk, Grow, Limit, Report, RowEnd, Start, Stop, Trim
from tidegate.kvcache.layout import Layout

SEEDS = range(5000, 5080)


class DoubleWorker(FakeWorker):
    """A fake worker of one token a row and launch, and a row table that must agree with it."""

    compared_count = 0

    def __init__(
        self,
        worker: Any,
        role: Any,
        layout: Layout,
        page_counts: Sequence[int],
        *rest: Any,
        **_: Any,
    ) -> None:
        super().__init__(worker, role, layout, page_counts, *rest)
        self.table = RowTable(layout, page_counts, self.row_count, VOCABULARY, (END_TOKEN,))
        self.feeds = self.table.next_launch().feeds

    def apply_to_row(self, operation: Start | Chunk | Grow | Limit | Trim | Stop) -> None:
        super().apply_to_row(operation)
        self.table.apply(operation)
        if isinstance(operation, Trim):
            assert self.table.take_trimmed() == tuple(self.trimmed[-1:])

    def make_launch(self, takes: Callable[[FakeRow], bool] = lambda _: True) -> Launch | None:
        if self.launches:
            return None
        launch = super().make_launch()
        self.feeds = self.table.next_launch().feeds
        assert self.table.take_faults() == ()
        mine = [] if launch is None else launch.feeds
        assert [(f.row, f.start, f.end, f.is_chunk) for f in self.feeds] == [
            (f.row.row, f.start, f.end, f.is_chunk) for f in mine
        ]
        for theirs, feed in zip(self.feeds, mine, strict=True):
            assert (theirs.request_id, theirs.output_index, theirs.sample) == (
                feed.row.script.request_id,
                feed.output_index,
                feed.count == 1,
            )
            for held, run in zip(theirs.pages, feed.runs, strict=True):
                # The table has forgotten pages below the window; the others are the same.
                forgotten = held.first_page - run.first
                assert forgotten >= 0 and held.ids.tolist() == run.ids[forgotten:]
        DoubleWorker.compared_count += len(mine)
        return launch

    def land(self, fault: Callable[[FakeRow], bool] = lambda _: False) -> Report:
        feeds = self.launches[0].feeds
        failed: list[FakeRow] = []

        def fails(row: FakeRow) -> bool:
            if fault(row):
                failed.append(row)
                self.table.fault(row.row, "device", "it failed")
            return row in failed

        report = super().land(fails)
        ended: list[RowEnd] = []
        for theirs, feed in zip(self.feeds, feeds, strict=True):
            if feed.row in failed:
                continue
            token = feed.row.script.token(feed.output_index) if feed.count else None
            end = self.table.settle(theirs, token)
            if end is not None:
                ended.append(end)
        assert tuple(ended) == report.ended
        assert len(self.table.take_faults()) == len(failed)
        return report


def test_the_row_table_feeds_what_the_fake_worker_feeds() -> None:
    for seed in SEEDS:
        Simulator(draw(seed), worker_class=DoubleWorker).run()
    assert DoubleWorker.compared_count > 5000
