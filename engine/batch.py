"""One launch: the tokens of all its rows, and where each layer writes and reads their KV.

The tokens of all segments are concatenated (ragged). Everything that depends only on lengths
and page tables is computed once, here, and shared by all layers of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.attention_plan import GroupPlan, GroupSegments, Ints, on_device
from tidegate.kvcache.layout import Layout, Pages, Tokens

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]


class BatchError(ValueError):
    """A launch that cannot be made; the text names the segment and what it lacks."""


@dataclass(frozen=True, slots=True)
class RowPages:
    """A row's page table in one group: `ids[0]` is the page with index `first_page`.

    Pages below it are null: they were given back, or never held.
    """

    first_page: int
    ids: Ids


@dataclass(frozen=True, slots=True)
class Segment:
    """A row's part of a launch: `tokens` at positions `start`, `start + 1`, …

    `pages` holds one table for each group of the layout, in its order. It covers every
    position from `first_needed(start)` to the end of the segment; further pages are ignored.
    `sample` asks for the logits after the last token.
    """

    tokens: Ids
    start: int
    sample: bool
    pages: tuple[RowPages, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a model's `forward` takes. Integer tensors are int64, on the model's device.

    `tokens` and `positions` have one entry for each token; `sample_rows` holds, for each
    segment with `sample` set, in order, the index of its last token. The rows of the logits
    are in that order. `groups` follow the layout. `segments` are what these were made of.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    groups: tuple[GroupPlan, ...]
    segments: tuple[GroupSegments, ...]

    @classmethod
    def build(
        cls,
        segments: Sequence[Segment],
        layout: Layout,
        device: torch.device | str = "cpu",
    ) -> "Batch":
        """Prepare a launch. Raises `BatchError` for an empty one, an empty segment, or page
        tables that do not cover what the segment reads and writes.
        """
        if not segments:
            raise BatchError("a launch needs at least one segment")
        for number, segment in enumerate(segments):
            _check(number, segment, layout)
        place = torch.device(device)
        starts = np.array([segment.start for segment in segments], np.int64)
        counts = np.array([len(segment.tokens) for segment in segments], np.int64)
        sampled = np.array([segment.sample for segment in segments], np.bool_)
        ends: Ints = counts.cumsum()
        positions: Ints = np.arange(int(ends[-1])) + np.repeat(starts - (ends - counts), counts)
        tokens = np.concatenate([np.asarray(item.tokens, np.int64) for item in segments])
        by_group = tuple(
            GroupSegments.of_tables(
                group,
                starts,
                counts,
                [segment.pages[index].first_page for segment in segments],
                [np.asarray(segment.pages[index].ids, np.int64) for segment in segments],
            )
            for index, group in enumerate(layout.groups)
        )
        return cls(
            tokens=on_device(tokens, place),
            positions=on_device(positions, place),
            sample_rows=on_device(ends[sampled] - 1, place),
            groups=tuple(group.plan(place) for group in by_group),
            segments=by_group,
        )

    @property
    def token_count(self) -> int:
        return self.tokens.shape[0]

    def groups_of_samples(self) -> tuple[GroupPlan, ...]:
        """`groups` for a launch of the tokens of `sample_rows` alone, in that order. They may
        only read: what a plan says of writing is done by the whole launch.
        """
        rows = self.sample_rows.cpu().numpy()
        device = self.sample_rows.device
        return tuple(group.tokens_alone(rows).plan(device) for group in self.segments)


def _check(number: int, segment: Segment, layout: Layout) -> None:
    end = segment.start + len(segment.tokens)
    if segment.start < 0 or end <= segment.start:
        raise BatchError(
            f"segment {number} has {len(segment.tokens)} tokens from position "
            f"{segment.start}: it needs at least one, from 0 or later"
        )
    if len(segment.pages) != len(layout.groups):
        raise BatchError(
            f"segment {number} has {len(segment.pages)} page tables, "
            f"the layout has {len(layout.groups)} groups"
        )
    for group, pages in zip(layout.groups, segment.pages, strict=True):
        first = group.first_needed(Tokens(segment.start))
        held_from = group.start_of(Pages(pages.first_page))
        held_to = group.start_of(Pages(pages.first_page + len(pages.ids)))
        if held_from > first or held_to < end:
            raise BatchError(
                f"segment {number} needs positions {first} to {end - 1} of group "
                f"{group.name!r}, its pages cover {held_from} to {held_to - 1}"
            )
