"""The pages that a row holds in one group, as a launch needs them."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.kvcache.layout import Group, Pages, Tokens

Int64s = npt.NDArray[np.int64]
_CAPACITY_MIN = 16


class HeldRun(msgspec.Struct, frozen=True):
    """What a row held at one moment: `ids[0]` is the page with index `first_page`."""

    first_page: int
    ids: Int64s


class HeldPages:
    """Consecutive pages: `first_page` is the index of the first one, the rest follow it.

    Pages that were given back are forgotten from below, granted ones appended above.
    """

    def __init__(self, group: Group, first_page: Pages, ids: Sequence[int]) -> None:
        self._group = group
        self._first_page: int = first_page
        self._start = 0
        self._end = len(ids)
        self._buffer: Int64s = np.zeros(max(_CAPACITY_MIN, len(ids)), np.int64)
        self._buffer[: len(ids)] = ids

    @property
    def run(self) -> HeldRun:
        """The pages held now. It stays as it is when pages are appended or forgotten."""
        # Both only move the ends of the view; ids in the buffer are never overwritten.
        return HeldRun(self._first_page, self._buffer[self._start : self._end])

    @property
    def held_to(self) -> Tokens:
        """One past the last position that the pages cover."""
        return self._group.start_of(Pages(self._first_page + self._end - self._start))

    def append(self, ids: Sequence[int]) -> None:
        if self._end + len(ids) > len(self._buffer):
            held = self.run.ids
            larger: Int64s = np.zeros(2 * (len(held) + len(ids)), np.int64)
            larger[: len(held)] = held
            self._buffer, self._start, self._end = larger, 0, len(held)
        self._buffer[self._end : self._end + len(ids)] = ids
        self._end += len(ids)

    def forget_beyond(self, position: Tokens) -> int:
        """Drop the pages that hold only positions from `position` on; returns how many."""
        keep = max(0, self._group.pages(position) - self._first_page)
        dropped = max(0, self._end - self._start - keep)
        self._end -= dropped
        return dropped

    def forget_below(self, position: Tokens) -> None:
        """Drop the pages that lie wholly below `first_needed(position)`."""
        keep_from = self._group.page_of(self._group.first_needed(position))
        dropped = min(max(0, keep_from - self._first_page), self._end - self._start)
        self._first_page += dropped
        self._start += dropped
