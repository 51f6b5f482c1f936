"""Pages that remember who wrote which position: what a pool holds, without tensors.

A cell stands for one token's keys and values. It names the position for which it was written,
and the author of the tokens up to there: a request, or a family of requests that begin alike.
So a read can tell whether it finds what it needs, an older owner's data or poison.
"""

from collections.abc import Sequence

from simulation.scripts import Script
from tidegate.kvcache.layout import Group, Layout

EMPTY = -1
POISON = -2
POSITIONS_MAX = 1 << 20


class SimulationError(AssertionError):
    """Something that must never happen has happened."""


class Run:
    """A row's pages of one group. `first` is the index of the first of them."""

    def __init__(self, first: int, ids: Sequence[int]) -> None:
        self.first = first
        self.ids = list(ids)

    def copy(self) -> "Run":
        return Run(self.first, self.ids)


class Memory:
    """The pools of one worker: a cell for each position of each page."""

    def __init__(self, layout: Layout, page_counts: Sequence[int]) -> None:
        self.layout = layout
        self.page_counts = tuple(page_counts)
        self._cells = [
            [EMPTY] * (count * group.page_tokens)
            for group, count in zip(layout.groups, page_counts, strict=True)
        ]

    def write(self, group: int, run: Run, script: Script, start: int, end: int) -> None:
        """Write positions [start, end) of the request."""
        cells = self._cells[group]
        for author, first, last in script.authors(start, end):
            for at, position, count in self._stretches(group, run, first, last):
                cell = author * POSITIONS_MAX + position
                cells[at : at + count] = range(cell, cell + count)

    def expect(self, group: int, run: Run, script: Script, start: int, end: int) -> None:
        """Raise unless [start, end) is there, and was written for such tokens up to there."""
        cells = self._cells[group]
        for author, first, last in script.authors(start, end):
            for at, position, count in self._stretches(group, run, first, last):
                cell = author * POSITIONS_MAX + position
                found = cells[at : at + count]
                if found != list(range(cell, cell + count)):
                    name = self.layout.groups[group].name
                    raise SimulationError(
                        f"request {script.number} reads positions {position} to "
                        f"{position + count - 1} of group {name} and finds "
                        f"{[_cell_text(each) for each in found]}"
                    )

    def poison(self, group: int, ids: Sequence[int]) -> None:
        page_tokens = self.layout.groups[group].page_tokens
        for page in ids:
            self._page(group, page)
            at = page * page_tokens
            self._cells[group][at : at + page_tokens] = [POISON] * page_tokens

    def copy_from(
        self, source: "Memory", group: int, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> None:
        """Copy pages of another pool, whatever they hold."""
        page_tokens = self.layout.groups[group].page_tokens
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            source._page(group, source_id)
            self._page(group, target_id)
            begin, at = source_id * page_tokens, target_id * page_tokens
            cells = source._cells[group][begin : begin + page_tokens]
            self._cells[group][at : at + page_tokens] = cells

    def _stretches(
        self, group: int, run: Run, start: int, end: int
    ) -> list[tuple[int, int, int]]:
        """(cell, position, count) for each page that [start, end) touches."""
        page_tokens = self.layout.groups[group].page_tokens
        stretches: list[tuple[int, int, int]] = []
        position = start
        while position < end:
            index = position // page_tokens - run.first
            if not 0 <= index < len(run.ids):
                name = self.layout.groups[group].name
                raise SimulationError(f"position {position} of group {name} has no page")
            slot = position % page_tokens
            count = min(end - position, page_tokens - slot)
            self._page(group, run.ids[index])
            stretches.append((run.ids[index] * page_tokens + slot, position, count))
            position += count
        return stretches

    def _page(self, group: int, page: int) -> None:
        if not 0 <= page < self.page_counts[group]:
            raise SimulationError(f"page {page} is not in pool {group}")


def covered(groups: Sequence[Group], runs: Sequence[Run]) -> int:
    """One past the last position that pages of every group cover."""
    return min(
        (run.first + len(run.ids)) * group.page_tokens
        for group, run in zip(groups, runs, strict=True)
    )


def _cell_text(cell: int) -> str:
    if cell == EMPTY:
        return "empty"
    if cell == POISON:
        return "poison"
    owner, position = divmod(cell, POSITIONS_MAX)
    return f"{owner}@{position}"
