"""Rows on a paged pool, with everything that no later step may read filled with NaN.

Pages are drawn at random and given back as soon as no query reads them. Before a launch all
free pages hold NaN, and so does every slot of a held page whose position is not needed.
Everything is derived from the layout: from `first_needed` of its groups, and from its flag.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tidegate.engine.batch import Batch, RowPages, Segment
from tidegate.engine.models.registry import Model
from tidegate.kvcache.layout import Group, Layout, Pages, Tokens
from tidegate.kvcache.page_store import PageStore


@dataclass
class PagedRow:
    """Positions [0, length) are settled. `pages[group]` maps page indices to page ids.

    `kept` says of each group that the row gives no page back below what queries need.
    """

    pages: list[dict[int, int]]
    kept: list[bool]
    length: int = 0


@dataclass
class Feed:
    row: PagedRow
    tokens: Sequence[int]
    sample: bool = True


@dataclass
class PagedRows:
    """A model with a poisoned pool of `page_count` pages in each group."""

    model: Model
    layout: Layout
    page_count: int
    device: str = "cpu"
    seed: int = 0
    free: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        groups = range(len(self.layout.groups))
        self.store = PageStore(self.layout, [self.page_count for _ in groups], self.device)
        self.random = random.Random(self.seed)
        self.free = [list(range(self.page_count)) for _ in groups]
        for group, ids in enumerate(self.free):
            self.random.shuffle(ids)
            self.store.poison(group, ids)

    def start(self, *, keeps_all: bool = False) -> PagedRow:
        """A row of no positions. One that `keeps_all` gives nothing back, as a prefix cache
        may hold on to it; others keep what the flag says until they are handed over.
        """
        return self._row(self.layout.swa_only_transfer is False, keeps_all)

    def launch(self, feeds: Sequence[Feed], *, every_position: bool = False) -> torch.Tensor:
        """Feed rows in one launch. Returns logits, on the CPU: [feeds that sample,
        vocabulary], or of every token, [tokens of all feeds in order, vocabulary].
        """
        segments = [self._segment(feed) for feed in feeds]
        batch = Batch.build(segments, self.layout, self.device)
        if every_position:
            rows = torch.arange(batch.token_count, device=batch.tokens.device)
            batch = replace(batch, sample_rows=rows)
        logits = self.model.forward(batch, self.store).cpu().clone()
        for feed in feeds:
            feed.row.length += len(feed.tokens)
            self._give_back(feed.row)
            self._poison_unused_slots(feed.row)
        return logits

    def hand_off(
        self, row: PagedRow, source: "PagedRows", left_out: tuple[int, int] | None = None
    ) -> PagedRow:
        """A row of this pool with a copy of the pages of `source` that are to be moved.

        The page with index `left_out[1]` of group `left_out[0]` is not copied, so it is NaN.
        """
        copy = self._row(False, False)
        copy.length = row.length
        for number, group in enumerate(self.layout.groups):
            low, high = moved_pages(self.layout, group, Tokens(row.length))
            for index in range(low, high):
                copy.pages[number][index] = self.free[number].pop()
            moved = [index for index in range(low, high) if (number, index) != left_out]
            old = [row.pages[number][index] for index in moved]
            new = [copy.pages[number][index] for index in moved]
            for tensor in range(len(group.tensors)):
                pages = source.store.tensor(number, tensor)[old]
                self.store.tensor(number, tensor)[new] = pages
        self._give_back(copy)
        self._poison_unused_slots(copy)
        return copy

    def adopt(self, donor: PagedRow, length: int) -> PagedRow:
        """A row that begins at `length` with pages of `donor`, as after a prefix hit: it takes
        over what its queries read below `length`. All else of the donor is dropped.
        """
        row = self._row(False, False)
        row.length = length
        for number, group in enumerate(self.layout.groups):
            low, high = needed_pages(group, Tokens(length))
            row.pages[number] = {
                index: donor.pages[number].pop(index) for index in range(low, high)
            }
        self.drop(donor)
        self._poison_unused_slots(row)
        return row

    def drop(self, row: PagedRow) -> None:
        """Give back and poison all pages of the row."""
        for number, pages in enumerate(row.pages):
            self._free(number, list(pages.values()))
            pages.clear()

    def held(self, row: PagedRow) -> list[int]:
        """How many pages the row holds in each group."""
        return [len(pages) for pages in row.pages]

    def _row(self, keeps_windows: bool, keeps_all: bool) -> PagedRow:
        groups = self.layout.groups
        kept = [keeps_all or (keeps_windows and group.is_window) for group in groups]
        return PagedRow([{} for _ in groups], kept)

    def _segment(self, feed: Feed) -> Segment:
        row, end = feed.row, feed.row.length + len(feed.tokens)
        tables: list[RowPages] = []
        for number, group in enumerate(self.layout.groups):
            pages = row.pages[number]
            low = min(pages, default=group.page_of(Tokens(row.length)))
            for index in range(low, group.pages(Tokens(end))):
                if index not in pages:
                    pages[index] = self.free[number].pop()
            order = sorted(pages)
            assert order == list(range(order[0], order[0] + len(order)))
            tables.append(RowPages(order[0], [pages[index] for index in order]))
        return Segment(feed.tokens, row.length, feed.sample, tuple(tables))

    def _give_back(self, row: PagedRow) -> None:
        for number, group in enumerate(self.layout.groups):
            if not row.kept[number]:
                low, _ = needed_pages(group, Tokens(row.length))
                unneeded = [index for index in row.pages[number] if index < low]
                self._free(number, [row.pages[number].pop(index) for index in unneeded])

    def _free(self, group: int, ids: list[int]) -> None:
        if ids:
            self.store.poison(group, ids)
        for page in ids:
            self.free[group].insert(self.random.randrange(len(self.free[group]) + 1), page)

    def _poison_unused_slots(self, row: PagedRow) -> None:
        """NaN into the slots of entries that are not complete, or that no query reads."""
        for number, group in enumerate(self.layout.groups):
            first = 0 if row.kept[number] else group.first_needed(Tokens(row.length))
            for tensor, spec in enumerate(group.tensors):
                size = spec.tokens_per_entry
                places = [
                    (page, entry)
                    for index, page in row.pages[number].items()
                    for entry, start in _edge_entries(group, index, size, first, row.length)
                    if start + size <= first or start + size > row.length
                ]
                if places:
                    pages, entries = torch.tensor(places, device=self.store.device).unbind(1)
                    self.store.tensor(number, tensor)[pages, entries] = torch.nan


def needed_pages(group: Group, length: Tokens) -> tuple[int, int]:
    """The indices [low, high) of the pages that queries at `length` or later read below it."""
    first, high = group.first_needed(length), group.pages(length)
    return (group.page_of(first) if first < length else high), high


def moved_pages(layout: Layout, group: Group, length: Tokens) -> tuple[int, int]:
    """The indices [low, high) of the pages that a hand-off at `length` moves."""
    if group.is_window and not layout.swa_only_transfer:
        return Pages(0), group.pages(length)
    return needed_pages(group, length)


def _edge_entries(
    group: Group, index: int, size: int, first: int, length: int
) -> list[tuple[int, int]]:
    """(entry, its first position) for the entries of a page that is not wholly in use."""
    start = group.start_of(Pages(index))
    if first <= start and start + group.page_tokens <= length:
        return []
    return [(entry, start + entry * size) for entry in range(group.page_tokens // size)]
