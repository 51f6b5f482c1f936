"""The page ids of one group on one worker, and the one state that each of them is in.

1. *Free*. It holds nothing that anybody may read: what is worth keeping is in the cache.
2. *Owned* by one holding (`take`). It is free again at once (`give_back`, when no launch in
   flight can touch it), or *draining* first (`drain`, `end_drain`).
3. An owned page may join the prefix cache (`attach`). From then on it is *shared*: read-only,
   and on lease to the holdings whose page tables name it. The first of them *pays*: the page
   counts against its account. When it goes, the next one pays.
4. A shared page without a lease is *idle*: the cache may evict it (`detach`), and it is free.
   But launches of a withdrawn row may still read it (`begin_read`); until the last `end_read`
   it is draining.
5. A page that leaves the cache while it is on lease stays with its lessees, and is free when
   the last of them and the last reader have gone.
"""

from collections.abc import Iterable
from typing import NewType

from tidegate.kvcache.layout import PageId, Pages

HoldingId = NewType("HoldingId", int)

_FREE = -1
_DRAINING = -2
_SHARED = -3


class PagePool:
    """Hand out page ids, the lowest first, and take them back. Ids are 0 to count - 1.

    So the pages of a holding lie in order and close together whenever there is room, and a
    launch reads them faster than pages from everywhere: a tenth of what gathering takes.
    """

    def __init__(self, page_count: Pages, *, note_freed: bool = False) -> None:
        """`note_freed` keeps the ids of freed pages for `take_freed`, which must be called."""
        assert page_count >= 0
        self.page_count = page_count
        self._is_free = bytearray([1]) * page_count
        self._free_count: int = page_count
        self._lowest = 0  # No page below it is free.
        self._owner = [_FREE] * page_count
        self._draining_count = 0
        self._freed: list[PageId] | None = [] if note_freed else None
        # Of shared pages. Lessees are in the order in which they came.
        self._lessees: dict[PageId, dict[HoldingId, None]] = {}
        self._readers: dict[PageId, int] = {}
        self._attached = [False] * page_count
        self._idle_count = 0

    @property
    def free_count(self) -> Pages:
        return Pages(self._free_count)

    @property
    def draining_count(self) -> Pages:
        return Pages(self._draining_count)

    @property
    def idle_count(self) -> Pages:
        """Pages that only the cache has: what eviction can free."""
        return Pages(self._idle_count)

    @property
    def owned_count(self) -> Pages:
        """Pages that holdings own or have on lease, each counted once."""
        others = self._free_count + self._draining_count + self._idle_count
        return Pages(self.page_count - others)

    def take(self, count: int, holding: HoldingId) -> tuple[PageId, ...]:
        """Give `count` free pages to the holding. The caller knows that they are free."""
        assert 0 <= count <= self._free_count, f"{count} pages asked of {self._free_count} free"
        pages: list[PageId] = []
        page = self._lowest
        for _ in range(count):
            page = self._is_free.index(1, page)
            self._is_free[page] = 0
            self._owner[page] = holding
            pages.append(PageId(page))
        self._lowest = page
        self._free_count -= count
        return tuple(pages)

    def give_back(self, pages: Iterable[PageId], holding: HoldingId) -> None:
        """Free pages that no launch in flight reads or writes."""
        for page in pages:
            self._expect(page, holding)
            self._set_free(page)

    def drain(self, pages: Iterable[PageId], holding: HoldingId) -> None:
        """Take pages from the holding; a launch in flight may still touch them."""
        for page in pages:
            self._expect(page, holding)
            self._owner[page] = _DRAINING
            self._draining_count += 1

    def end_drain(self, pages: Iterable[PageId]) -> None:
        for page in pages:
            self._expect(page, _DRAINING)
            self._draining_count -= 1
            self._set_free(page)

    def owner(self, page: PageId) -> HoldingId | None:
        """The holding that owns the page; None while it is free, draining or shared."""
        owner = self._owner[page]
        return HoldingId(owner) if owner >= 0 else None

    @property
    def attached_count(self) -> Pages:
        """Pages that are in the cache, idle or not. Counts them all: for checks."""
        return Pages(sum(self._attached))

    def is_shared(self, page: PageId) -> bool:
        return self._owner[page] == _SHARED

    def is_idle(self, page: PageId) -> bool:
        """Only the cache has the page."""
        is_used = page in self._lessees or page in self._readers
        return self._attached[page] and not is_used

    def payer(self, page: PageId) -> HoldingId | None:
        """The lessee against whom a shared page counts; None without one, or while it is read
        for a lessee that has gone."""
        lessees = self._lessees.get(page)
        return next(iter(lessees)) if lessees and page not in self._readers else None

    def attach(self, page: PageId, holding: HoldingId) -> None:
        """A page of the holding joins the cache: its own, or one that had left the cache."""
        assert not self._attached[page], f"page {page} is in the cache already"
        if self._owner[page] == holding:
            self._owner[page] = _SHARED
            self._lessees[page] = {holding: None}
        assert holding in self._lessees.get(page, ()), f"page {page} is not of {holding}"
        self._attached[page] = True

    def detach(self, page: PageId) -> None:
        """The page leaves the cache. It is free at once if only the cache had it."""
        assert self._attached[page], f"page {page} is not in the cache"
        was_idle = self.is_idle(page)
        self._attached[page] = False
        if was_idle:
            self._idle_count -= 1
            self._set_free(page)

    def lease(self, page: PageId, holding: HoldingId) -> None:
        """One more holding reads a page of the cache."""
        assert self._attached[page], f"page {page} is not in the cache"
        if self.is_idle(page):
            self._idle_count -= 1
        lessees = self._lessees.setdefault(page, {})
        assert holding not in lessees, f"page {page} is on lease to {holding} already"
        if not lessees and page in self._readers:
            self._draining_count -= 1
        lessees[holding] = None

    def end_lease(self, page: PageId, holding: HoldingId) -> None:
        """No launch in flight of the holding reads the page any more."""
        self._leave(page, holding)
        if page in self._lessees:
            return
        if page in self._readers:
            self._draining_count += 1
        else:
            self._unused(page)

    def begin_read(self, pages: Iterable[PageId], holding: HoldingId) -> None:
        """The holding's leases end, but its launches in flight may still read the pages."""
        for page in pages:
            self._leave(page, holding)
            if page not in self._lessees:
                self._draining_count += 1
            self._readers[page] = self._readers.get(page, 0) + 1

    def end_read(self, pages: Iterable[PageId]) -> None:
        for page in pages:
            self._readers[page] -= 1
            if not self._readers[page]:
                del self._readers[page]
                if page not in self._lessees:
                    self._draining_count -= 1
                    self._unused(page)

    def take_freed(self) -> list[PageId]:
        """The pages freed since the last call, for a pool that notes them."""
        assert self._freed is not None
        freed, self._freed = self._freed, []
        return freed

    def check(self) -> None:
        """Assert that every page is in exactly one state, and that the counts agree."""
        free = [owner == _FREE for owner in self._owner]
        assert free == [bool(mark) for mark in self._is_free], "a mark of a free page is wrong"
        assert sum(free) == self._free_count, "the count of free pages is off"
        assert not any(free[: self._lowest]), "a page below the lowest free one is free"
        shared = [PageId(page) for page, owner in enumerate(self._owner) if owner == _SHARED]
        read_only = [p for p in shared if p in self._readers and p not in self._lessees]
        draining_count = self._owner.count(_DRAINING) + len(read_only)
        assert draining_count == self._draining_count, "the count of draining pages is off"
        assert sum(map(self.is_idle, shared)) == self._idle_count, "the count of idle is off"
        assert set(shared) >= {*self._lessees, *self._readers}
        for page in shared:
            is_used = page in self._lessees or page in self._readers
            assert self._attached[page] or is_used, f"shared page {page} is lost"
        assert all(self._lessees.values()) and all(n > 0 for n in self._readers.values())
        assert sum(self._attached) == sum(self._attached[page] for page in shared)

    def lessees(self, page: PageId) -> tuple[HoldingId, ...]:
        return tuple(self._lessees.get(page, ()))

    def _leave(self, page: PageId, holding: HoldingId) -> None:
        lessees = self._lessees.get(page, {})
        assert holding in lessees, f"page {page} is not on lease to {holding}"
        del lessees[holding]
        if not lessees:
            del self._lessees[page]

    def _unused(self, page: PageId) -> None:
        """The last lessee and the last reader are gone."""
        if self._attached[page]:
            self._idle_count += 1
        else:
            self._set_free(page)

    def _set_free(self, page: PageId) -> None:
        self._owner[page] = _FREE
        self._is_free[page] = 1
        self._free_count += 1
        self._lowest = min(self._lowest, page)
        if self._freed is not None:
            self._freed.append(page)

    def _expect(self, page: PageId, owner: int) -> None:
        found = self._owner[page]
        assert found == owner, f"page {page} belongs to {found}, not to {owner}"
