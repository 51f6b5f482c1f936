"""The page ids of one group on one worker: each is free, owned by one holding, or draining.

The life of a page: free → owned by a holding (`take`) → free at once (`give_back`, when no
launch in flight can touch it), or draining (`drain`) → free (`end_drain`).
"""

from collections import deque
from collections.abc import Iterable
from typing import NewType

from tidegate.kvcache.layout import PageId, Pages

HoldingId = NewType("HoldingId", int)

_FREE = -1
_DRAINING = -2


class PagePool:
    """Hand out page ids, oldest freed first, and take them back. Ids are 0 to count - 1."""

    def __init__(self, page_count: Pages) -> None:
        assert page_count >= 0
        self.page_count = page_count
        self._free = deque(PageId(index) for index in range(page_count))
        self._owner = [_FREE] * page_count
        self._draining_count = 0

    @property
    def free_count(self) -> Pages:
        return Pages(len(self._free))

    @property
    def draining_count(self) -> Pages:
        return Pages(self._draining_count)

    @property
    def owned_count(self) -> Pages:
        return Pages(self.page_count - len(self._free) - self._draining_count)

    def take(self, count: int, holding: HoldingId) -> tuple[PageId, ...]:
        """Give `count` free pages to the holding. The caller knows that they are free."""
        assert 0 <= count <= len(self._free), f"{count} pages asked of {len(self._free)} free"
        pages = tuple(self._free.popleft() for _ in range(count))
        for page in pages:
            self._owner[page] = holding
        return pages

    def give_back(self, pages: Iterable[PageId], holding: HoldingId) -> None:
        """Free pages that no launch in flight reads or writes."""
        for page in pages:
            self._expect(page, holding)
            self._owner[page] = _FREE
            self._free.append(page)

    def drain(self, pages: Iterable[PageId], holding: HoldingId) -> None:
        """Take pages from the holding; a launch in flight may still touch them."""
        for page in pages:
            self._expect(page, holding)
            self._owner[page] = _DRAINING
            self._draining_count += 1

    def end_drain(self, pages: Iterable[PageId]) -> None:
        for page in pages:
            self._expect(page, _DRAINING)
            self._owner[page] = _FREE
            self._draining_count -= 1
            self._free.append(page)

    def owner(self, page: PageId) -> HoldingId | None:
        """The holding that owns the page; None while it is free or draining."""
        owner = self._owner[page]
        return HoldingId(owner) if owner >= 0 else None

    def check(self) -> None:
        """Assert that every page is in exactly one state, and the free list agrees."""
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert all(self._owner[page] == _FREE for page in self._free)
        assert self._owner.count(_FREE) == len(self._free), "a free page left the free list"
        assert self._owner.count(_DRAINING) == self._draining_count

    def _expect(self, page: PageId, owner: int) -> None:
        found = self._owner[page]
        assert found == owner, f"page {page} belongs to {found}, not to {owner}"
