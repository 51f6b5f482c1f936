"""The books of one worker's pools: who holds which page, and who was promised how many.

A *holding* is one row's pages in all groups. It is opened with a *reserve* for each group: as
many pages as it may hold at any time, promised all or nothing across the groups. What it
holds beyond its reserve is *surplus*, taken only from pages that are promised to nobody. So a
holding that stays within its reserve never waits, and what admission counts as available
can be obtained by the same call.

Pages leave a holding in three ways. Below `first_needed` of a settled position they are free
at once: no launch in flight reads or writes them. So are the last ones of a row whose worker
has said that it has fed nothing of them and will not: they are *shed*. Otherwise they *drain*
until the worker's `completed` has reached the plan that withdrew them.

With a prefix cache, a row goes like this:

1. `find` says how much of its prompt is cached. `open` with that hit leases the pages to the
   holding: its page tables begin with them, and it only reads them.
2. `publish` makes the full units of its prompt known to others. Their pages stay in its tables.
3. When such a page leaves the holding, only its lease ends, at once or when it has drained.
   A page without a lease is *idle*. Idle pages count as available, as free ones do, and
   `cover` evicts them when no page is free.

A page that several holdings have on lease counts once. In a group whose pages a holding has
to its end, each of them needs no other page in its place, so each is promised only what it
lacks. In a rolling group a holding will drop the page and take another, although nothing
becomes free while the others keep it. So one of them *pays* for it with its reserve, and the
others are promised a page in its place; when the payer drops it, the next one pays. While
launches of a withdrawn row may still read the page, nobody pays.
"""

from collections import deque
from collections.abc import Sequence

from tidegate.kvcache.drained import Drained
from tidegate.kvcache.layout import Layout, PageId, Pages, Tokens
from tidegate.kvcache.page_table import PageTable
from tidegate.kvcache.pool import HoldingId, PagePool
from tidegate.kvcache.prefix_cache import PrefixCache
from tidegate.kvcache.prefix_node import UnitHash
from tidegate.kvcache.prefix_row import CacheRow, Hit


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
        self.unpaid = [0] * len(tables)  # Leased pages of rolling groups that others pay for.
        self.cached_tokens = Tokens(0)
        self.row: CacheRow | None = None

    def lacks(self, group: int) -> Pages:
        """Pages of the reserve that the holding has not taken."""
        return Pages(max(0, self.reserve[group] - self.tables[group].page_count))

    def promised(self, group: int) -> Pages:
        """What it lacks, and a page for each that it does not pay for."""
        return Pages(self.lacks(group) + self.unpaid[group])

    @property
    def covered(self) -> Tokens:
        """One past the last position that pages of every group cover."""
        return min(table.covered for table in self.tables)


class Books:
    """Pools of one worker, one for each group of the layout."""

    def __init__(
        self,
        layout: Layout,
        page_counts: Sequence[int],
        *,
        note_freed: bool = False,
        caches: bool = False,
        whole_windows: bool = False,
    ) -> None:
        """`note_freed` keeps the ids of freed pages for `take_freed`, which must be called.

        `caches` adds a prefix cache. `whole_windows` says that the rows to be cached keep
        the windows of their whole prompt until a hand-off moves them; see `keeps_windows`.
        """
        assert len(page_counts) == len(layout.groups)
        self.layout = layout
        self.pools = [PagePool(Pages(n), note_freed=note_freed) for n in page_counts]
        self.cache = (
            PrefixCache(layout, self.pools, whole_windows=whole_windows) if caches else None
        )
        self._holdings: dict[HoldingId, Holding] = {}
        self._promised = [0] * len(self.pools)
        self._draining: deque[Drained] = deque()
        self._next_id = 0

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
        """Pages that are free, or idle in the cache, and promised to nobody."""
        pool = self.pools[group]
        return Pages(pool.free_count + pool.idle_count - self._promised[group])

    def all_available(self) -> list[Pages]:
        """`available` of each group."""
        return [self.available(group) for group in range(len(self.pools))]

    def find(
        self, chain: Sequence[UnitHash], prompt: Tokens, *, keeps_windows: bool
    ) -> Hit | None:
        """How much of a prompt is cached, for `open`; None if such a row cannot be cached.

        The chain has a hash for each full unit of the prompt (`cache.unit` tokens), each of
        which stands for all tokens up to the unit's end. The hit may be of no tokens: the row
        publishes only if it is opened with one. It holds while `is_valid` says so.
        """
        if self.cache is None or self.cache.whole_windows != keeps_windows:
            return None
        return self.cache.find(chain, prompt)

    def chunk_end(self, settled: Tokens, until: Tokens, prompt: Tokens) -> Tokens:
        """Where a chunk of a prompt that may go on to `until` had better end.

        Of a tail group a chunk leaves only what its end still needs. So where there is one,
        others find the prompt only up to ends of chunks that are ends of units.
        """
        if self.cache is None or not self.cache.has_tails or until >= prompt:
            return until
        boundary = self.cache.last_boundary(until)
        return boundary if boundary > settled else until

    def is_valid(self, hit: Hit) -> bool:
        """Are all pages of the hit still there? What was cached since may make it longer."""
        return self.cache is not None and hit.generation == self.cache.generation

    def shortage(
        self, reserve: Sequence[Pages], hit: Hit | None = None
    ) -> tuple[int, Pages] | None:
        """The first group that cannot promise its reserve now, and how many pages it lacks.

        A hit never makes it lack more.
        """
        for group, pages in enumerate(reserve):
            lack = pages - self.available(group)
            if lack > 0 and hit is not None:
                lack = self._needed(group, pages, hit) - self.available(group)
            if lack > 0:
                return group, Pages(lack)
        return None

    def open(
        self,
        reserve: Sequence[Pages],
        starts: Sequence[Tokens],
        *,
        keeps_windows: bool,
        hit: Hit | None = None,
    ) -> Holding | None:
        """A holding with these reserves, or None (and nothing changes).

        It has the pages of the hit, which must be valid, and else none yet. `starts` says for
        each group where its page run begins; see `run_starts`.
        """
        if self.shortage(reserve, hit) is not None:
            return None
        tables = [
            PageTable(group, start)
            for group, start in zip(self.layout.groups, starts, strict=True)
        ]
        holding = Holding(HoldingId(self._next_id), tables, list(reserve), keeps_windows)
        self._next_id += 1
        self._holdings[holding.holding_id] = holding
        if hit is not None:
            self._lease(holding, hit)
        for group in range(len(reserve)):
            self._promised[group] += holding.promised(group)
        return holding

    def cover(
        self, holding: Holding, group: int, until: Tokens, *, surplus: bool
    ) -> tuple[PageId, ...]:
        """Take pages so that positions below `until` are covered, as far as they can be had.

        The reserve is always there; pages beyond it are taken only with `surplus`, and only
        what is promised to nobody. Returns the new pages, in order of position.
        """
        table, pool, before = holding.tables[group], self.pools[group], holding.promised(group)
        limit = holding.lacks(group) + (self.available(group) if surplus else 0)
        count = min(table.missing(until), limit)
        while pool.free_count < count:
            assert self.cache is not None, "a promise is not covered by free pages"
            self.cache.evict(group)
        pages = pool.take(count, holding.holding_id)
        table.append(pages)
        self._promised[group] += holding.promised(group) - before
        holding.peak[group] = max(holding.peak[group], table.page_count)
        return pages

    def can_cover(self, holding: Holding, until: Tokens, *, surplus: bool) -> bool:
        """Would `cover` reach to the end in every group?"""
        return all(
            table.missing(until) <= holding.lacks(g) + (self.available(g) if surplus else 0)
            for g, table in enumerate(holding.tables)
        )

    def publish(self, holding: Holding, settled: Tokens) -> None:
        """All launches up to this position are over: let others find the full units below.

        It comes before `reclaim` of the same position, at the end of each launch of the prompt.
        """
        if self.cache is not None and holding.row is not None:
            self.cache.publish(holding.row, holding.holding_id, holding.tables, settled)

    def reclaim(self, holding: Holding, settled: Tokens) -> None:
        """Give back what no query at `settled` or later reads; a worker has answered for it."""
        for index, group in enumerate(self.layout.groups):
            if holding.keeps_windows and group.is_window:
                continue
            first = group.first_needed(settled)
            if first > 0:
                self._give_back(holding, index, first)

    def next_reclaim(self, holding: Holding) -> Tokens | None:
        """The lowest position that gives a page back once it is settled; None if none does."""
        past = [
            group.first_past(table.first_page_end)
            for group, table in zip(self.layout.groups, holding.tables, strict=True)
        ]
        return min((position for position in past if position is not None), default=None)

    def shed(self, holding: Holding, group: int, count: Pages) -> None:
        """Free the last pages of the holding, which no launch has fed nor will feed."""
        before = holding.promised(group)
        pages = holding.tables[group].drop_last(count)
        self.pools[group].give_back(pages, holding.holding_id)
        self._promised[group] += holding.promised(group) - before

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
        del self._holdings[holding.holding_id]
        drained = Drained(plan)
        for group, (pool, table) in enumerate(zip(self.pools, holding.tables, strict=True)):
            self._promised[group] -= holding.promised(group)
            pages = table.clear()
            owned = [page for page in pages if not pool.is_shared(page)]
            leased = [page for page in pages if pool.is_shared(page)]
            pool.drain(owned, holding.holding_id)
            if self._is_rolling(group):
                for page in leased:
                    if (payer := pool.payer(page)) != holding.holding_id:
                        self._count_unpaid(payer, group, 1)
            pool.begin_read(leased, holding.holding_id)
            drained.owned.append(owned)
            drained.leased.append(leased)
        if any(drained.owned) or any(drained.leased):
            self._draining.append(drained)

    def complete(self, plan: int) -> None:
        """All launches made under plans up to this one are over: free what drained for them."""
        while self._draining and self._draining[0].plan <= plan:
            drained = self._draining.popleft()
            for group, pool in enumerate(self.pools):
                pool.end_drain(drained.owned[group])
                leased = drained.leased[group]
                pool.end_read(leased)
                if self._is_rolling(group):
                    for page in leased:
                        self._count_unpaid(pool.payer(page), group, -1)
                if self.cache is not None:
                    self.cache.released(group, leased)

    def evict_all(self) -> None:
        """Free every page that only the cache has."""
        for group, pool in enumerate(self.pools):
            while pool.idle_count:
                assert self.cache is not None
                self.cache.evict(group)

    def take_freed(self) -> list[list[PageId]]:
        """For each group the pages freed since the last call, to be poisoned in tests."""
        return [pool.take_freed() for pool in self.pools]

    def check(self) -> None:
        """Assert that every page has one state and one owner, and every promise is covered."""
        if self.cache is not None:
            self.cache.check()
        for group, pool in enumerate(self.pools):
            pool.check()
            self._check_pages(group, pool)
            promised = sum(h.promised(group) for h in self._holdings.values())
            assert promised == self._promised[group], "the sum of promises is off"
            obtainable = pool.free_count + pool.idle_count
            assert promised <= obtainable, "a promise is not covered by free pages"

    def _check_pages(self, group: int, pool: PagePool) -> None:
        drained = sum(len(each.owned[group]) for each in self._draining)
        read = {page for each in self._draining for page in each.leased[group]}
        drained += sum(not pool.lessees(page) and not pool.is_idle(page) for page in read)
        assert drained == pool.draining_count, "a draining page is forgotten"
        lessees: dict[PageId, set[HoldingId]] = {}
        owned_count = 0
        for holding in self._holdings.values():
            unpaid = 0
            for page in holding.tables[group].ids:
                if pool.is_shared(page):
                    lessees.setdefault(page, set()).add(holding.holding_id)
                    unpaid += pool.payer(page) != holding.holding_id
                else:
                    assert pool.owner(page) == holding.holding_id, f"page {page} of another"
                    owned_count += 1
            assert holding.unpaid[group] == (unpaid if self._is_rolling(group) else 0)
        assert owned_count + len(lessees) == pool.owned_count, "a page is in no page table"
        assert all(set(pool.lessees(page)) == found for page, found in lessees.items())

    def _is_rolling(self, group: int) -> bool:
        return self.cache is not None and not self.cache.is_whole[group]

    def _needed(self, group: int, reserve: Pages, hit: Hit) -> int:
        """How many of the available pages a holding with this hit takes, or is promised."""
        assert self.cache is not None and self.is_valid(hit), "the hit is out of date"
        if self._is_rolling(group):
            return reserve  # It takes those that are idle, and pays for no others.
        pages = self.cache.pages(hit, group)
        return max(0, reserve - len(pages)) + sum(map(self.pools[group].is_idle, pages))

    def _lease(self, holding: Holding, hit: Hit) -> None:
        assert self.cache is not None and self.is_valid(hit), "the hit is out of date"
        for group, (pool, table) in enumerate(zip(self.pools, holding.tables, strict=True)):
            pages = self.cache.pages(hit, group)
            assert len(pages) <= holding.reserve[group], "a reserve is less than the hit"
            for page in pages:
                pool.lease(page, holding.holding_id)
            if self._is_rolling(group):
                paid = sum(pool.payer(page) == holding.holding_id for page in pages)
                holding.unpaid[group] = len(pages) - paid
            table.append(pages)
            assert not pages or table.covered == hit.tokens, "the run begins elsewhere"
            holding.peak[group] = table.page_count
        holding.cached_tokens = hit.tokens
        holding.row = self.cache.enter(hit)

    def _give_back(self, holding: Holding, group: int, first: Tokens) -> None:
        pool, before = self.pools[group], holding.promised(group)
        pages = holding.tables[group].drop_below(first)
        leased = [page for page in pages if pool.is_shared(page)]
        owned = [page for page in pages if not pool.is_shared(page)]
        pool.give_back(owned, holding.holding_id)
        assert not leased or self._is_rolling(group), "pages that stay to the end are leased"
        for page in leased:
            payer = pool.payer(page)
            pool.end_lease(page, holding.holding_id)
            if payer == holding.holding_id:
                self._count_unpaid(pool.payer(page), group, -1)
            else:
                holding.unpaid[group] -= 1
        self._promised[group] += holding.promised(group) - before
        if self.cache is not None:
            self.cache.released(group, leased)

    def _count_unpaid(self, holding_id: HoldingId | None, group: int, change: int) -> None:
        """The holding, if there is one, begins to pay for a page (-1), or ends (1)."""
        if holding_id is not None:
            self._holdings[holding_id].unpaid[group] += change
            self._promised[group] += change
