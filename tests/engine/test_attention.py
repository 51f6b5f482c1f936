"""What attention costs: memory for scores is bounded, and a window's work is linear."""

from unittest.mock import patch

import torch

from tidegate.engine.attention import SCORE_ROWS, Scratch, attend
from tidegate.engine.batch import Batch, RowPages, Segment
from tidegate.kvcache.layout import All, Group, Layout, Reach, TensorSpec, Tokens, Window
from tidegate.kvcache.page_store import PageStore

HEADS, KEY_HEADS, SIZE = 4, 2, 8
PAGE_TOKENS = 16
BLOCK = SCORE_ROWS["cpu"] // (HEADS // KEY_HEADS)


def score_counts(reach: Reach, segments: list[tuple[int, int]]) -> list[int]:
    """How many scores each softmax got in a launch of segments (start, count)."""
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
    queries = torch.randn(batch.token_count, HEADS, SIZE)
    keys = torch.randn(batch.token_count, KEY_HEADS, SIZE)
    sizes: list[int] = []
    softmax = torch.softmax

    def noted_softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(scores.numel())
        return softmax(scores, dim)

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
    return sizes


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


def test_a_later_chunk_of_a_window_costs_no_more_than_the_first_full_one() -> None:
    early = score_counts(Window(Tokens(100)), [(256, 256)])
    late = score_counts(Window(Tokens(100)), [(4096, 256)])
    assert late == early


def test_decode_rows_share_a_softmax_and_pad_to_similar_rows_only() -> None:
    counts = score_counts(All(), [(100, 1), (3000, 1), (110, 1)])
    pages = [188, 7]
    assert counts == [HEADS * pages[0] * PAGE_TOKENS, 2 * HEADS * pages[1] * PAGE_TOKENS]
