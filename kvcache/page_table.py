"""The page table of one row in one group: which page holds which positions.

Positions are absolute. The pages held are one run: those below it were given back and are
null (there is no entry for them), those above it are not granted yet.
"""

from collections.abc import Iterable, Sequence

from tidegate.kvcache.layout import Group, PageId, Pages, Tokens


class PageTable:
    """A run of pages of `group`, which begins with the page that holds position `start`."""

    def __init__(self, group: Group, start: Tokens) -> None:
        self._group = group
        self._first = group.page_of(start)
        self._ids: list[PageId] = []

    @property
    def page_count(self) -> Pages:
        return Pages(len(self._ids))

    @property
    def ids(self) -> tuple[PageId, ...]:
        return tuple(self._ids)

    @property
    def first_page(self) -> Pages:
        """The index of the first page of the run."""
        return self._first

    @property
    def first_position(self) -> Tokens:
        """The first position that the run covers."""
        return self._group.start_of(self._first)

    @property
    def first_page_end(self) -> Tokens:
        """One past the last position of the first page."""
        return self._group.start_of(Pages(self._first + 1))

    @property
    def last_page_start(self) -> Tokens:
        """The first position of the last page; where the next would begin if there is none."""
        return self._group.start_of(Pages(self._first + max(0, len(self._ids) - 1)))

    @property
    def covered(self) -> Tokens:
        """One past the last position that the run covers."""
        return self._group.start_of(Pages(self._first + len(self._ids)))

    def missing(self, until: Tokens) -> Pages:
        """How many more pages cover every position below `until`."""
        return Pages(max(0, self._group.pages(until) - self._first - len(self._ids)))

    def append(self, pages: Iterable[PageId]) -> None:
        self._ids.extend(pages)

    def drop_below(self, position: Tokens) -> tuple[PageId, ...]:
        """Remove and return the pages that hold only positions below `position`."""
        count = min(len(self._ids), max(0, self._group.page_of(position) - self._first))
        dropped = tuple(self._ids[:count])
        del self._ids[:count]
        self._first = Pages(self._first + count)
        return dropped

    def beyond(self, position: Tokens) -> Pages:
        """How many pages of the run hold only positions from `position` on."""
        end = self._first + len(self._ids)
        return Pages(max(0, end - max(self._first, self._group.pages(position))))

    def drop_last(self, count: Pages) -> tuple[PageId, ...]:
        """Remove and return the last pages of the run."""
        assert 0 <= count <= len(self._ids), "more pages than there are"
        keep = len(self._ids) - count
        dropped = tuple(self._ids[keep:])
        del self._ids[keep:]
        return dropped

    def run(self, start: Tokens, end: Tokens) -> tuple[Tokens, tuple[PageId, ...]]:
        """The pages that touch [start, end), and the first position of the first of them."""
        first = self._group.page_of(start)
        return self._group.start_of(first), self.pages(first, self._group.span(start, end))

    def pages(self, first: int, count: int) -> tuple[PageId, ...]:
        """`count` pages of the run, from the page with index `first` on."""
        offset = first - self._first
        assert offset >= 0 and offset + count <= len(self._ids), "positions without a page"
        return tuple(self._ids[offset : offset + count])

    def clear(self) -> tuple[PageId, ...]:
        """Remove and return every page."""
        pages = tuple(self._ids)
        self._first = Pages(self._first + len(pages))
        self._ids.clear()
        return pages


def run_starts(
    groups: Sequence[Group], first_query: Tokens, *, keeps_windows: bool
) -> tuple[Tokens, ...]:
    """Where page runs begin for a row whose next query is at `first_query`."""
    return tuple(
        Tokens(0) if keeps_windows and group.is_window else group.first_needed(first_query)
        for group in groups
    )
