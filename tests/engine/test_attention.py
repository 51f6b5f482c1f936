"""What attention costs: memory for scores is bounded, and a window's work is linear."""

from unittest.mock import patch

import torch

from tidegate.engine.attention import (
    BUFFER_GROWTH_MIN,
    SCORE_COUNT_MAX,
    SCORE_ROWS,
    SCORES,
    Scratch,
    attend,
)
from tidegate.engine.batch import Batch, RowPages, Segment
from tidegate.kvcache.layout import All, Group, Layout, Reach, TensorSpec, Tokens, Window
from tidegate.kvcache.page_store import PageStore

HEADS, KEY_HEADS, SIZE = 4, 2, 8
PAGE_TOKENS = 16
BLOCK = SCORE_ROWS["cpu"] // (HEADS // KEY_HEADS)


def score_counts(reach: Reach, segments: list[tuple[int, int]]) -> list[int]:
    """How many scores each softmax got in a launch of segments (start, count)."""
    return run(reach, segments)[0]


def run(reach: Reach, segments: list[tuple[int, int]]) -> tuple[list[int], torch.Tensor]:
    """How many scores each softmax got, and what came out; earlier positions hold zeros."""
    specs = tuple(
        TensorSpec(name, 0, (KEY_HEADS, SIZE), "float32") for name in ("keys", "values")
    )
    layout = Layout((Group("group", reach, Tokens(PAGE_TOKENS), specs),), None)
    pages = [-(-(start + count) // PAGE_TOKENS) for start, count in segments]
    store = PageStore(layout, [sum(pages)])
    tables = [
        RowPages(0, range(sum(pages[:n]), sum(pages[: n + 1]))) for n in range(len(pages))
    ]
    batch = Batch.build(
        [
            Segment([0] * count, start, False, (table,))
            for (start, count), table in zip(segments, tables, strict=True)
        ],
        layout,
    )
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(batch.token_count, HEADS, SIZE, generator=generator)
    keys = torch.randn(batch.token_count, KEY_HEADS, SIZE, generator=generator)
    sizes: list[int] = []
    softmax = torch.softmax

    def noted_softmax(
        scores: torch.Tensor, dim: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        sizes.append(scores.numel())
        return softmax(scores, dim, out=out)

    with patch.object(torch, "softmax", noted_softmax):
        attended = attend(
            batch.groups[0],
            queries,
            keys,
            keys,
            store.tensor(0, 0),
            store.tensor(0, 1),
            Scratch(),
        )
    assert attended.shape == (batch.token_count, HEADS * SIZE)
    assert attended.isfinite().all()
    return sizes, attended


def test_a_windows_work_grows_with_the_prompt_and_its_memory_does_not() -> None:
    short = score_counts(Window(Tokens(100)), [(0, 1024)])
    long = score_counts(Window(Tokens(100)), [(0, 4096)])
    assert sum(long) < 4.3 * sum(short)
    assert max(long) == max(short) <= SCORE_ROWS["cpu"] * (BLOCK + 100)


def test_full_attention_holds_the_scores_of_one_block_at_a_time() -> None:
    counts = score_counts(All(), [(0, 2048)])
    assert max(counts) <= SCORE_ROWS["cpu"] * 2048
    # Keys that come after a block are not even looked at.
    assert sum(counts) < 0.6 * HEADS * 2048 * 2048


def test_where_there_are_many_keys_a_block_has_fewer_queries() -> None:
    segments = [(3000, 300), (0, 40), (0, 700)]
    counts, expected = run(All(), segments)
    assert max(counts) > 100_000
    with patch.dict(SCORE_COUNT_MAX, cpu=100_000):
        smaller, found = run(All(), segments)
    assert max(smaller) <= 100_000
    # For 3,300 keys 8 queries at a time, so 16 rows; the first block sees 3,008 of them.
    assert smaller[0] == 16 * 3008
    assert (found - expected).abs().max() < 1e-5
    with patch.dict(SCORE_COUNT_MAX, cpu=1):
        _, found = run(All(), [(0, 40)])
    assert (found - run(All(), [(0, 40)])[1]).abs().max() < 1e-5


def test_a_window_does_not_make_blocks_smaller_however_long_the_prompt_is() -> None:
    with patch.dict(SCORE_COUNT_MAX, cpu=256 * 400):
        counts = score_counts(Window(Tokens(100)), [(5000, 1000)])
    assert max(counts) == SCORE_ROWS["cpu"] * (BLOCK + 99)


def test_a_buffer_is_kept_and_grows_by_steps() -> None:
    scratch, cpu = Scratch(), torch.device("cpu")
    first = scratch.take(SCORES, (10, 100), torch.float32, cpu)
    assert first.shape == (10, 100) and first.is_contiguous()
    again = scratch.take(SCORES, (20, 50), torch.float32, cpu)
    assert again.data_ptr() == first.data_ptr()
    grown = scratch.take(SCORES, (1, 1001), torch.float32, cpu)
    assert grown.untyped_storage().nbytes() == 4 * int(1000 * BUFFER_GROWTH_MIN)
    assert scratch.take(SCORES, (5,), torch.bfloat16, cpu).dtype is torch.bfloat16


def test_a_later_chunk_of_a_window_costs_no_more_than_the_first_full_one() -> None:
    early = score_counts(Window(Tokens(100)), [(256, 256)])
    late = score_counts(Window(Tokens(100)), [(4096, 256)])
    assert late == early


def test_decode_rows_share_a_softmax_and_pad_to_similar_rows_only() -> None:
    counts = score_counts(All(), [(100, 1), (3000, 1), (110, 1)])
    pages = [188, 7]
    assert counts == [HEADS * pages[0] * PAGE_TOKENS, 2 * HEADS * pages[1] * PAGE_TOKENS]
