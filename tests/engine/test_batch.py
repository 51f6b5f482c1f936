"""A launch's index tensors: positions, places to write, rows to sample, and what it refuses."""

import numpy as np
import pytest
import torch

from tidegate.engine.attention_plan import BUCKET_BYTES_MAX, DecodeBucket
from tidegate.engine.batch import Batch, BatchError, RowPages, Segment
from tidegate.kvcache.layout import All, Group, Layout, TensorSpec, Tokens, Window

TENSORS = (
    TensorSpec("keys.0", 0, (1, 4), "float32"),
    TensorSpec("values.0", 0, (1, 4), "float32"),
)
FULL = Group("full", All(), Tokens(4), TENSORS)
WINDOW = Group("window", Window(Tokens(6)), Tokens(2), TENSORS)
LAYOUT = Layout((FULL, WINDOW), True)
FULL_ONLY = Layout((FULL,), None)


def decode_row(position: int, first_id: int = 0) -> Segment:
    """One token at `position`, with pages `first_id`, `first_id + 1`, … of the full group."""
    count = position // 4 + 1
    return Segment([1], position, True, (RowPages(0, range(first_id, first_id + count)),))


def numbers(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor]


def page_counts(buckets: tuple[DecodeBucket, ...]) -> list[tuple[int, int]]:
    """Rows and pages of each bucket."""
    return [(len(bucket.rows), len(bucket.pages) // len(bucket.rows)) for bucket in buckets]


def test_tokens_positions_and_sampling_rows_follow_the_segments() -> None:
    batch = Batch.build(
        [
            Segment([7, 8, 9], 0, False, (RowPages(0, [5]),)),
            Segment(np.array([3], np.uint32), 6, True, (RowPages(0, [2, 4]),)),
            Segment((1, 2), 4, True, (RowPages(0, np.array([9, 1, 0])),)),
        ],
        FULL_ONLY,
    )
    assert batch.token_count == 6
    assert numbers(batch.tokens) == [7, 8, 9, 3, 1, 2]
    assert numbers(batch.positions) == [0, 1, 2, 6, 4, 5]
    assert numbers(batch.sample_rows) == [3, 5]


def test_each_token_is_written_to_the_slot_of_its_position_in_each_group() -> None:
    pages = (RowPages(0, [5, 3, 8]), RowPages(1, [7, 6, 0, 4]))
    batch = Batch.build([Segment([1, 2, 3], 7, False, pages)], LAYOUT)
    full, window = batch.groups
    assert numbers(full.write_pages) == [3, 8, 8]
    assert numbers(full.write_slots) == [3, 0, 1]
    assert numbers(window.write_pages) == [0, 4, 4]
    assert numbers(window.write_slots) == [1, 0, 1]


def test_a_decode_row_reads_from_the_first_needed_position_on_and_no_page_below() -> None:
    # Position 8 with a window of 6 reads 3 to 8; pages of 2 begin at position 2.
    pages = (RowPages(0, [5, 3, 8]), RowPages(1, [9, 6, 0, 4]))
    batch = Batch.build([Segment([1], 8, True, pages)], LAYOUT)
    bucket = batch.groups[1].decode[0]
    assert numbers(bucket.pages) == [9, 6, 0, 4]
    assert numbers(bucket.unused) == [0, 7]
    assert numbers(bucket.mask[0, 0].isinf()) == [True, *[False] * 6, True]


def test_sampled_tokens_alone_read_as_a_launch_of_them_would() -> None:
    tables = (
        (RowPages(0, [5, 3, 8]), RowPages(1, [9, 6, 0, 4])),
        (RowPages(0, [1]), RowPages(0, [2])),
        (RowPages(0, [6, 7]), RowPages(0, [1, 3, 5, 7])),
    )
    batch = Batch.build(
        [
            Segment([1, 2, 3], 7, True, tables[0]),
            Segment([4], 0, False, tables[1]),
            Segment([5, 6], 4, True, tables[2]),
        ],
        LAYOUT,
    )
    alone = Batch.build(
        [Segment([3], 9, True, tables[0]), Segment([6], 5, True, tables[2])], LAYOUT
    )
    for found, expected in zip(batch.groups_of_samples(), alone.groups, strict=True):
        assert found.reach == expected.reach
        assert found.prefill == ()
        for bucket, wanted in zip(found.decode, expected.decode, strict=True):
            assert numbers(bucket.rows) == numbers(wanted.rows)
            assert numbers(bucket.pages) == numbers(wanted.pages)
            assert numbers(bucket.unused) == numbers(wanted.unused)
            assert bucket.mask.equal(wanted.mask)


def test_a_launch_without_samples_has_plans_of_no_tokens() -> None:
    batch = Batch.build([Segment([1, 2], 0, False, (RowPages(0, [4]),))], FULL_ONLY)
    (group,) = batch.groups_of_samples()
    assert (group.decode, group.prefill, numbers(group.write_pages)) == ((), (), [])


def test_a_short_row_is_padded_with_its_own_pages() -> None:
    batch = Batch.build([decode_row(18, 10), decode_row(8, 30)], FULL_ONLY)
    bucket = batch.groups[0].decode[0]
    assert numbers(bucket.rows) == [0, 1]
    assert numbers(bucket.pages) == [10, 11, 12, 13, 14, 30, 31, 32, 32, 32]
    assert numbers(bucket.unused) == [19, *range(29, 40)]


def test_a_long_row_does_not_make_short_rows_pad() -> None:
    segments = [decode_row(40), decode_row(4000), decode_row(41)]
    buckets = Batch.build(segments, FULL_ONLY).groups[0].decode
    assert page_counts(buckets) == [(1, 1001), (2, 11)]
    assert [numbers(bucket.rows) for bucket in buckets] == [[1], [0, 2]]


def test_what_buckets_pad_is_a_bounded_share() -> None:
    lengths = [int(3000 * 0.97**n) + n % 3 for n in range(200)]
    buckets = Batch.build([decode_row(n) for n in lengths], FULL_ONLY).groups[0].decode
    padded = sum(rows * pages for rows, pages in page_counts(buckets))
    assert padded <= sum(length // 4 + 1 for length in lengths) / 0.75
    assert sorted(row for bucket in buckets for row in numbers(bucket.rows)) == list(range(200))
    assert len(buckets) < 30


def test_what_a_bucket_gathers_is_bounded_unless_it_is_one_row() -> None:
    segments = [decode_row(100_000) for _ in range(9)]
    buckets = Batch.build(segments, FULL_ONLY).groups[0].decode
    for rows, pages in page_counts(buckets):
        assert rows == 1 or rows * pages * 4 * 16 <= BUCKET_BYTES_MAX["cpu"]
    assert [rows for rows, _ in page_counts(buckets)] == [2, 2, 2, 2, 1]


def test_a_longer_segment_reads_only_pages_that_it_needs() -> None:
    pages = (RowPages(0, range(20)), RowPages(0, range(100, 140)))
    batch = Batch.build([Segment(range(9), 21, True, pages)], LAYOUT)
    (piece,) = batch.groups[1].prefill
    assert (piece.first_key, piece.skip) == (16, 0)
    assert numbers(piece.pages) == [108, 109, 110, 111, 112, 113, 114]
    assert numbers(batch.groups[0].prefill[0].pages) == list(range(8))
    assert batch.groups[1].decode == ()


def test_later_changes_of_a_page_table_do_not_reach_the_launch() -> None:
    ids = np.array([3, 4], np.int64)
    batch = Batch.build([Segment([1, 2], 3, True, (RowPages(0, ids),))], FULL_ONLY)
    ids[:] = 9
    assert numbers(batch.groups[0].write_pages) == [3, 4]
    assert numbers(batch.groups[0].prefill[0].pages) == [3, 4]


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        (Segment([], 3, True, (RowPages(0, [1]),)), "segment 0 has 0 tokens from position 3"),
        (
            Segment([1], -1, True, (RowPages(0, [1]),)),
            "segment 0 has 1 tokens from position -1",
        ),
        (
            Segment([1], 4, True, (RowPages(0, [1]),)),
            "needs positions 0 to 4 of group 'full', its pages cover 0 to 3",
        ),
        (
            Segment([1], 4, True, (RowPages(1, [1]),)),
            "needs positions 0 to 4 of group 'full', its pages cover 4 to 7",
        ),
        (Segment([1], 0, True, ()), "segment 0 has 0 page tables, the layout has 1 groups"),
    ],
)
def test_a_segment_that_cannot_run_is_refused_by_what_it_lacks(
    segment: Segment, text: str
) -> None:
    with pytest.raises(BatchError, match=text):
        Batch.build([segment], FULL_ONLY)


def test_a_page_below_the_window_may_be_missing_but_not_one_inside() -> None:
    full = RowPages(0, [1, 2, 3])
    Batch.build([Segment([1], 8, True, (full, RowPages(1, [1, 2, 3, 4])))], LAYOUT)
    with pytest.raises(BatchError, match="needs positions 3 to 8 of group 'window'"):
        Batch.build([Segment([1], 8, True, (full, RowPages(2, [2, 3, 4])))], LAYOUT)


def test_a_launch_without_segments_is_refused() -> None:
    with pytest.raises(BatchError, match="at least one segment"):
        Batch.build([], FULL_ONLY)
