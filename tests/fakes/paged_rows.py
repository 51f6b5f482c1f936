"""Rows on a paged pool, with everything that no later step may read filled with NaN.

Pages are drawn at random and given back as soon as no query reads them. Before a launch all
free pages hold NaN, and so does every slot of a held page whose position is not needed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tidegate.engine.batch import Batch, RowPages, Segment
from tidegate.engine.models.registry import Model
from tidegate.kvcache.layout import Layout, Tokens
from tidegate.kvcache.page_store import PageStore


@dataclass
class PagedRow:
    """Positions [0, length) are settled. `pages[group]` maps page indices to page ids."""

    pages: list[dict[int, int]]
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
    keep_window_pages: bool = False
    free: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        groups = range(len(self.layout.groups))
        self.store = PageStore(self.layout, [self.page_count for _ in groups], self.device)
        self.random = random.Random(self.seed)
        self.free = [list(range(self.page_count)) for _ in groups]
        for group, ids in enumerate(self.free):
            self.random.shuffle(ids)
            self.store.poison(group, ids)

    def start(self) -> PagedRow:
        return PagedRow([{} for _ in self.layout.groups])

    def launch(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Feed rows in one launch; logits [feeds that sample, vocabulary], on the CPU."""
        segments = [self._segment(feed) for feed in feeds]
        batch = Batch.build(segments, self.layout, self.device)
        logits = self.model.forward(batch, self.store).cpu().clone()
        for feed in feeds:
            feed.row.length += len(feed.tokens)
            self._give_back(feed.row)
            self._poison_unused_slots(feed.row)
        return logits

    def hand_off(self, row: PagedRow, source: "PagedRows") -> PagedRow:
        """A row of this pool with a copy of the pages of `source` that decoding needs."""
        copy = self.start()
        copy.length = row.length
        for number, group in enumerate(self.layout.groups):
            first = group.first_needed(Tokens(row.length))
            low = group.page_of(first)
            for index in range(low, group.pages(Tokens(row.length))):
                page = self.free[number].pop()
                copy.pages[number][index] = page
                for tensor in range(len(group.tensors)):
                    old = source.store.tensor(number, tensor)[row.pages[number][index]]
                    self.store.tensor(number, tensor)[page].copy_(old)
        return copy

    def drop(self, row: PagedRow) -> None:
        """Give back and poison all pages of the row."""
        for number, pages in enumerate(row.pages):
            self.store.poison(number, list(pages.values()))
            self.free[number].extend(pages.values())
            pages.clear()

    def held(self, row: PagedRow) -> list[int]:
        """How many pages the row holds in each group."""
        return [len(pages) for pages in row.pages]

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
            first = group.page_of(group.first_needed(Tokens(row.length)))
            unneeded = [index for index in row.pages[number] if index < first]
            if self.keep_window_pages:
                unneeded = []
            ids = [row.pages[number].pop(index) for index in unneeded]
            self.store.poison(number, ids)
            for page in ids:
                self.free[number].insert(
                    self.random.randrange(len(self.free[number]) + 1), page
                )

    def _poison_unused_slots(self, row: PagedRow) -> None:
        for number, group in enumerate(self.layout.groups):
            first = group.first_needed(Tokens(row.length))
            for index, page in row.pages[number].items():
                start = index * group.page_tokens
                below = max(first - start, 0)
                above = max(row.length - start, 0)
                if below == 0 and above >= group.page_tokens:
                    continue
                for tensor in range(len(group.tensors)):
                    slots = self.store.tensor(number, tensor)[page]
                    slots[:below].fill_(torch.nan)
                    slots[above:].fill_(torch.nan)
