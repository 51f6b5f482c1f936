"""The checks of families find faults, and know groups of every reach."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch
from transformers import Gemma3TextConfig

from fakes.family_checks import CHECKS, offsets, reach, settling_steps
from fakes.paged_rows import Feed, PagedRows
from fakes.tiny_family import FamilyModels, TinyCase, load
from tidegate.engine.batch import Batch
from tidegate.kvcache.layout import All, Group, Layout, Tail, TensorSpec, Tokens, Window
from tidegate.kvcache.page_store import PageStore

WINDOW = 7
GEMMA3 = TinyCase(
    "gemma3",
    lambda: Gemma3TextConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    page_tokens=4,
)


@dataclass
class Scribe:
    """Writes to each slot its position plus 1, and so an entry of several its last one's."""

    layout: Layout

    def forward(self, batch: Batch, store: PageStore) -> torch.Tensor:
        for number, (group, plan) in enumerate(
            zip(self.layout.groups, batch.groups, strict=True)
        ):
            for index, spec in enumerate(group.tensors):
                slots = plan.write_slots.div(spec.tokens_per_entry, rounding_mode="floor")
                numbers = (batch.positions + 1).float()[:, None]
                store.tensor(number, index)[plan.write_pages, slots] = numbers
        return torch.zeros(len(batch.sample_rows), 1)


def group(name: str, reach: All | Window | Tail, *tokens_per_entry: int) -> Group:
    tensors = tuple(
        TensorSpec(f"{name}.{size}", 0, (1,), "float32", size) for size in tokens_per_entry
    )
    return Group(name, reach, Tokens(4), tensors)


LAYOUT = Layout(
    (
        group("full", All(), 1, 2, 4),
        group("window", Window(Tokens(6)), 1),
        group("tail", Tail(Tokens(3), 1), 1),
    ),
    swa_only_transfer=True,
)


def contents(rows: PagedRows, number: int, tensor: int, pages: dict[int, int]) -> list[float]:
    """What the entries of a row's pages hold, in order of position."""
    order = [pages[index] for index in sorted(pages)]
    return [float(value) for value in rows.store.tensor(number, tensor)[order].flatten()]


def numbers(*values: float | None) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_layout_with_too_small_a_window_is_found_out(
    check: Callable[[FamilyModels], None],
) -> None:
    family = load(GEMMA3)
    check(family)
    full, window = family.layout.groups
    assert window.reach == Window(Tokens(WINDOW))
    smaller = msgspec.structs.replace(window, reach=Window(Tokens(WINDOW - 1)))
    layout = msgspec.structs.replace(family.layout, groups=(full, smaller))
    with pytest.raises(AssertionError, match=r"\(.+\)"):
        check(replace(family, layout=layout))


def test_what_no_query_reads_is_not_there_after_a_launch() -> None:
    rows = PagedRows(Scribe(LAYOUT), LAYOUT, 20)
    row = rows.start()
    rows.launch([Feed(row, [0] * 11)], every_position=True)
    # Position 5 is the lowest that a window of 6 at 11 reads, 6 that the tail still needs:
    # the third window of 3 is not closed, and one before it counts.
    assert rows.held(row) == [3, 2, 2]
    nan = pytest.approx
    full, window, tail = row.pages
    assert contents(rows, 0, 0, full) == nan(numbers(*range(1, 12), None), nan_ok=True)
    assert contents(rows, 0, 1, full) == nan(numbers(2, 4, 6, 8, 10, None), nan_ok=True)
    assert contents(rows, 0, 2, full) == nan(numbers(4, 8, None), nan_ok=True)
    expected = numbers(None, None, 7, 8, 9, 10, 11, None)
    assert contents(rows, 1, 0, window) == nan(expected, nan_ok=True)
    assert contents(rows, 2, 0, tail) == nan(expected, nan_ok=True)
    free = rows.store.tensor(1, 0)[rows.free[1]]
    assert free.isnan().all()


def test_a_hand_off_moves_what_each_reach_needs() -> None:
    source = PagedRows(Scribe(LAYOUT), LAYOUT, 20, seed=1)
    target = PagedRows(Scribe(LAYOUT), LAYOUT, 20, seed=2)
    row = source.start()
    source.launch([Feed(row, [0] * 12)])
    moved = target.hand_off(row, source)
    # At 12 the tail's last window is closed, and it still needs that one: 9 to 11.
    assert [sorted(pages) for pages in moved.pages] == [[0, 1, 2], [1, 2], [2]]
    assert contents(target, 2, 0, moved.pages[2]) == pytest.approx(
        numbers(None, 10, 11, 12), nan_ok=True
    )
    left_out = target.hand_off(row, source, left_out=(1, 1))
    assert contents(target, 1, 0, left_out.pages[1])[:4] == pytest.approx(
        numbers(None, None, None, None), nan_ok=True
    )


def test_a_forced_flag_keeps_all_window_pages_until_the_hand_off() -> None:
    layout = LAYOUT.with_forced_flag(False)
    source, target = (PagedRows(Scribe(layout), layout, 20, seed=seed) for seed in (3, 4))
    row = source.start()
    source.launch([Feed(row, [0] * 10)])
    source.launch([Feed(row, [0] * 10)])
    assert source.held(row) == [5, 5, 2]
    assert contents(source, 1, 0, row.pages[1]) == [float(n) for n in range(1, 21)]
    free = len(target.free[1])
    moved = target.hand_off(row, source)
    assert [sorted(pages) for pages in moved.pages] == [[0, 1, 2, 3, 4], [3, 4], [3, 4]]
    assert len(target.free[1]) == free - 2


def test_the_lengths_to_try_lie_around_every_edge() -> None:
    assert reach(LAYOUT) == 6  # The window's; a tail of (3, 1) is at most as long.
    # Pages end at 4, 8, 12; the window drops a page from 9 and 13 on, the tail at 9 and 12.
    assert {3, 4, 5, 6, 7, 8, 9, 10, 12, 13} <= set(offsets(LAYOUT))
    assert settling_steps(LAYOUT, [9]) > 6
    plain = Layout((group("full", All(), 1),), swa_only_transfer=None)
    assert offsets(plain) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
