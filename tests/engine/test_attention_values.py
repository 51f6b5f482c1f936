"""What attention computes, against plain arithmetic: sinks, value sizes, stored keys."""

import random
from dataclasses import dataclass

import pytest
import torch

from tidegate.engine.attention import Scratch, attend, attend_stored
from tidegate.engine.batch import Batch, RowPages, Segment
from tidegate.kvcache.layout import All, Group, Layout, Reach, TensorSpec, Tokens, Window
from tidegate.kvcache.page_store import PageStore

PAGE_TOKENS = 8
PAGE_COUNT = 200
# Rows of a launch as (first position, count): decode rows and prefill pieces, in any order.
LAUNCHES = [
    [(0, 1), (0, 40), (5, 1), (30, 1)],
    [(1, 2), (17, 30), (60, 1), (61, 1), (62, 1)],
    [(0, 300), (250, 40)],
]


@dataclass(frozen=True)
class Sizes:
    heads: int
    key_heads: int
    key: int
    value: int


SIZES = [Sizes(4, 2, 8, 8), Sizes(4, 1, 12, 8), Sizes(3, 3, 8, 20), Sizes(8, 2, 24, 16)]


class Case:
    """Rows on shuffled pages, whose slots outside of what each row may read hold NaN."""

    def __init__(
        self, sizes: Sizes, reach: Reach, rows: list[tuple[int, int]], seed: int
    ) -> None:
        self.sizes, self.reach, self.rows = sizes, reach, rows
        self.generator = torch.Generator().manual_seed(seed)
        specs = (
            TensorSpec("keys", 0, (sizes.key_heads, sizes.key), "float32"),
            TensorSpec("values", 0, (sizes.key_heads, sizes.value), "float32"),
        )
        layout = Layout((Group("group", reach, Tokens(PAGE_TOKENS), specs),), None)
        self.group = layout.groups[0]
        store = PageStore(layout, [PAGE_COUNT])
        store.poison(0, range(PAGE_COUNT))
        self.key_pages, self.value_pages = store.tensor(0, 0), store.tensor(0, 1)
        free = list(range(PAGE_COUNT))
        random.Random(seed).shuffle(free)
        # Of each row all keys and values, from position 0 to its end.
        self.keys = [self.random(start + n, sizes.key_heads, sizes.key) for start, n in rows]
        self.values = [
            self.random(start + n, sizes.key_heads, sizes.value) for start, n in rows
        ]
        segments: list[Segment] = []
        for number, (start, count) in enumerate(rows):
            low = self.group.page_of(self.group.first_needed(Tokens(start)))
            high = self.group.pages(Tokens(start + count))
            ids = [free.pop() for _ in range(low, high)]
            for position in range(self.group.first_needed(Tokens(start)), start):
                page, slot = divmod(position, PAGE_TOKENS)
                self.key_pages[ids[page - low], slot] = self.keys[number][position]
                self.value_pages[ids[page - low], slot] = self.values[number][position]
            segments.append(Segment([0] * count, start, False, (RowPages(low, ids),)))
        self.plan = Batch.build(segments, layout).groups[0]
        self.queries = self.random(sum(n for _, n in rows), sizes.heads, sizes.key)
        self.new_keys = torch.cat([k[s:] for k, (s, _) in zip(self.keys, rows, strict=True)])
        self.new_values = torch.cat(
            [v[s:] for v, (s, _) in zip(self.values, rows, strict=True)]
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def attended(self, sinks: torch.Tensor | None) -> torch.Tensor:
        pages = (self.key_pages, self.value_pages)
        return attend(
            self.plan, self.queries, self.new_keys, self.new_values, *pages, Scratch(), sinks
        )

    def attended_again(self, sinks: torch.Tensor | None) -> torch.Tensor:
        pages = (self.key_pages, self.value_pages)
        return attend_stored(self.plan, self.queries, *pages, Scratch(), sinks)

    def expected(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """One query at a time, over exactly the positions that it may read."""
        results: list[torch.Tensor] = []
        queries = iter(self.queries)
        for number, (start, count) in enumerate(self.rows):
            for position in range(start, start + count):
                low = self.group.first_needed(Tokens(position))
                keys, values = (
                    kept[number][low : position + 1].repeat_interleave(
                        self.sizes.heads // self.sizes.key_heads, 1
                    )
                    for kept in (self.keys, self.values)
                )
                scores = torch.einsum("hd,thd->ht", next(queries), keys)
                weights = scores.exp()
                total = weights.sum(1, keepdim=True)
                if sinks is not None:
                    total = total + sinks.exp().unsqueeze(1)
                results.append(torch.einsum("ht,thv->hv", weights / total, values).flatten())
        return torch.stack(results)


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reach", [All(), Window(Tokens(1)), Window(Tokens(20))], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_every_query_attends_to_what_it_may_read(
    reach: Reach, sizes: Sizes, has_sinks: bool
) -> None:
    for seed, rows in enumerate(LAUNCHES):
        case = Case(sizes, reach, rows, seed)
        sinks = case.random(sizes.heads) if has_sinks else None
        expected = case.expected(sinks)
        assert_near(case.attended(sinks), expected)
        # Another layer that reads what this one has stored, and stores nothing.
        before = (case.key_pages.clone(), case.value_pages.clone())
        assert_near(case.attended_again(sinks), expected)
        for pages, kept in zip((case.key_pages, case.value_pages), before, strict=True):
            assert torch.equal(pages.nan_to_num(7), kept.nan_to_num(7))


def test_a_great_sink_takes_all_of_the_weight_and_a_small_one_none() -> None:
    case = Case(SIZES[0], Window(Tokens(20)), LAUNCHES[0], 0)
    without = case.attended(None)
    assert_near(case.attended(torch.full((4,), -1e4)), without)
    assert case.attended(torch.full((4,), 1e4)).abs().max() == 0
    # A sink belongs to its own head.
    mixed = case.attended(torch.tensor([-1e4, 1e4, -1e4, 1e4])).view(-1, 4, 8)
    assert_near(mixed[:, 0::2], without.view(-1, 4, 8)[:, 0::2])
    assert mixed[:, 1::2].abs().max() == 0
