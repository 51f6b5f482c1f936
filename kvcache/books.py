"""The books of one worker's pools: who holds which page, and who was promised how many.

A *holding* is one row's pages in all groups. It is opened with a *reserve* for each group: as
many pages as it may hold at any time, promised all or nothing across the groups. What it
holds beyond its reserve is *surplus*, taken only from pages that are promised to nobody. So a
holding that stays within its reserve never waits, and what admission counts as available
can be obtained by the same call.

Pages leave a holding in two ways. Below `first_needed` of a settled position they are free
at once: no launch in flight reads or writes them. Otherwise they *drain* until the worker's
`completed` has reached the plan that withdrew them.
"""

from collections import deque
from collections.abc import Sequence

from tidegate.kvcache.layout import Group, Layout, PageId, Pages, Tokens
from tidegate.kvcache.page_table import PageTable
from tidegate.kvcache.pool import HoldingId, PagePool


class Holding:
    """One row's pages. `keeps_windows` says that no window page is given back for now."""

    def __init__(
        self,
        holding_id: HoldingId,
        tables: list[PageTable],
        reserve: list[Pages],
        keeps_windows: bool,
    ) -> None:
        self.holding_id = holding_id
        self.tables = tables
        self.reserve = reserve
        self.keeps_windows = keeps_windows
        self.peak = [Pages(0)] * len(tables)

    def promised(self, group: int) -> Pages:
        """Pages of the reserve that the holding has not taken."""
        return Pages(max(0, self.reserve[group] - self.tables[group].page_count))

    @property
    def covered(self) -> Tokens:
        """One past the last position that pages of every group cover."""
        return min(table.covered for table in self.tables)


class Books:
    """Pools of one worker, one for each group of the layout."""

    def __init__(
        self, layout: Layout, page_counts: Sequence[int], *, note_freed: bool = False
    ) -> None:
        """`note_freed` keeps the ids of freed pages for `take_freed`, which must be called."""
        assert len(page_counts) == len(layout.groups)
        self.layout = layout
        self.pools = [PagePool(Pages(count)) for count in page_counts]
        self._holdings: dict[HoldingId, Holding] = {}
        self._promised = [0] * len(self.pools)
        self._draining: deque[tuple[int, list[tuple[PageId, ...]]]] = deque()
        self._next_id = 0
        self._note_freed = note_freed
        self._freed: list[list[PageId]] = [[] for _ in self.pools]

    @property
    def page_counts(self) -> tuple[Pages, ...]:
        return tuple(pool.page_count for pool in self.pools)

    @property
    def is_idle(self) -> bool:
        """No page is held or draining."""
        return not self._holdings and not self._draining

    @property
    def is_draining(self) -> bool:
        return bool(self._draining)

    def available(self, group: int) -> Pages:
        """Pages that are free and promised to nobody."""
        return Pages(self.pools[group].free_count - self._promised[group])

    def shortage(self, reserve: Sequence[Pages]) -> tuple[int, Pages] | None:
        """The first group that cannot promise its reserve now, and how many pages it lacks."""
        for group, pages in enumerate(reserve):
            lack = pages - self.available(group)
            if lack > 0:
                return group, Pages(lack)
        return None

    def open(
        self, reserve: Sequence[Pages], starts: Sequence[Tokens], *, keeps_windows: bool
    ) -> Holding | None:
        """A holding with these reserves and no pages yet, or None (and nothing changes).

        `starts` says for each group where the holding's page run begins.
        """
        if self.shortage(reserve) is not None:
            return None
        tables = [
            PageTable(group, start)
            for group, start in zip(self.layout.groups, starts, strict=True)
        ]
        holding = Holding(HoldingId(self._next_id), tables, list(reserve), keeps_windows)
        self._next_id += 1
        self._holdings[holding.holding_id] = holding
        for group, pages in enumerate(reserve):
            self._promised[group] += pages
        return holding

    def cover(
        self, holding: Holding, group: int, until: Tokens, *, surplus: bool
    ) -> tuple[PageId, ...]:
        """Take pages so that positions below `until` are covered, as far as they can be had.

        The reserve is always there; pages beyond it are taken only with `surplus`, and only
        what is promised to nobody. Returns the new pages, in order of position.
        """
        table = holding.tables[group]
        promised = holding.promised(group)
        limit = promised + (self.available(group) if surplus else 0)
        pages = self.pools[group].take(min(table.missing(until), limit), holding.holding_id)
        table.append(pages)
        self._promised[group] -= promised - holding.promised(group)
        holding.peak[group] = max(holding.peak[group], table.page_count)
        return pages

    def reclaim(self, holding: Holding, settled: Tokens) -> None:
        """Give back what no query at `settled` or later reads; a worker has answered for it."""
        for index, group in enumerate(self.layout.groups):
            if holding.keeps_windows and group.is_window:
                continue
            first = group.first_needed(settled)
            if first > 0:
                self._give_back(holding, index, first)

    def lower(self, holding: Holding, reserve: Sequence[Pages]) -> None:
        """Promise less from now on. Pages beyond the new reserve become surplus."""
        for group, pages in enumerate(reserve):
            assert pages <= holding.reserve[group], "a reserve is only ever lowered"
            before = holding.promised(group)
            holding.reserve[group] = pages
            self._promised[group] -= before - holding.promised(group)

    def close(self, holding: Holding) -> None:
        """Promise nothing more: the holding keeps its pages and takes no other."""
        self.lower(
            holding,
            [
                min(reserve, table.page_count)
                for reserve, table in zip(holding.reserve, holding.tables, strict=True)
            ],
        )

    def withdraw(self, holding: Holding, plan: int) -> None:
        """End the holding. Its pages drain until the worker has completed the plan."""
        self.close(holding)
        del self._holdings[holding.holding_id]
        taken = [table.clear() for table in holding.tables]
        for pool, pages in zip(self.pools, taken, strict=True):
            pool.drain(pages, holding.holding_id)
        if any(taken):
            self._draining.append((plan, taken))

    def complete(self, plan: int) -> None:
        """All launches made under plans up to this one are over: free what drained for them."""
        while self._draining and self._draining[0][0] <= plan:
            _, taken = self._draining.popleft()
            for group, pages in enumerate(taken):
                self.pools[group].end_drain(pages)
                if self._note_freed:
                    self._freed[group].extend(pages)

    def take_freed(self) -> list[list[PageId]]:
        """For each group the pages freed since the last call, to be poisoned in tests."""
        freed = self._freed
        self._freed = [[] for _ in self.pools]
        return freed

    def check(self) -> None:
        """Assert that every page has one state and one owner, and every promise is covered."""
        drained = [0] * len(self.pools)
        for _, taken in self._draining:
            for group, pages in enumerate(taken):
                drained[group] += len(pages)
        for group, pool in enumerate(self.pools):
            pool.check()
            held = [page for h in self._holdings.values() for page in h.tables[group].ids]
            assert len(held) == pool.owned_count, "a page is owned by no page table"
            assert drained[group] == pool.draining_count, "a draining page is forgotten"
            for holding in self._holdings.values():
                for page in holding.tables[group].ids:
                    assert pool.owner(page) == holding.holding_id, f"page {page} of another"
            promised = sum(h.promised(group) for h in self._holdings.values())
            assert promised == self._promised[group], "the sum of promises is off"
            assert promised <= pool.free_count, "a promise is not covered by free pages"

    def _give_back(self, holding: Holding, index: int, first: Tokens) -> None:
        before = holding.promised(index)
        pages = holding.tables[index].drop_below(first)
        self.pools[index].give_back(pages, holding.holding_id)
        self._promised[index] += holding.promised(index) - before
        if self._note_freed:
            self._freed[index].extend(pages)


def run_starts(
    groups: Sequence[Group], first_query: Tokens, *, keeps_windows: bool
) -> tuple[Tokens, ...]:
    """Where page runs begin for a row whose next query is at `first_query`."""
    return tuple(
        Tokens(0) if keeps_windows and group.is_window else group.first_needed(first_query)
        for group in groups
    )
