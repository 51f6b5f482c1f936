"""Compressed entries: one for a window of tokens, written when the window is complete.

1. Every token leaves a row and gates in the tail pages of its layer.
2. When a launch brings the last token of a window, the window's rows are read back, from
   whichever launch they came, and with them those of the window before if windows overlap.
3. The entry is their sum, weighed by the softmax of gates and bias, normalised and rotated by
   the window's first position. It goes to the page of the window's tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tidegate.engine.attention_plan import GroupPlan, GroupSegments, Ints, on_device
from tidegate.engine.models.deepseek_v4_layout import TensorPlace
from tidegate.engine.models.parts import normalise
from tidegate.engine.models.rotary import Rotary, rotate
from tidegate.kvcache.page_store import PageStore

Take = Callable[[str], torch.Tensor]  # A layer's weight, by its name there.


@dataclass(frozen=True, slots=True)
class Closings:
    """The n windows that a launch completes, of all its segments, for layers of one kind.

    `row_pages` and `row_slots` [n, windows an entry is made of, ratio] are places in tail
    pages, the window before first; where there is none `is_first` [n] is set, and its own rows
    stand in. `entry_pages` and `entry_slots` [n] are where the entries go. `rotation` is for
    the windows' first positions.
    """

    count: int
    row_pages: torch.Tensor
    row_slots: torch.Tensor
    is_first: torch.Tensor
    entry_pages: torch.Tensor
    entry_slots: torch.Tensor
    rotation: torch.Tensor

    @classmethod
    def of_launch(
        cls,
        tail: GroupSegments,
        full: GroupSegments,
        ratio: int,
        overlap: int,
        rotary: Rotary,
        device: torch.device,
    ) -> "Closings":
        """Those of a launch with these segments, which are the same in both groups."""
        lows = tail.starts // ratio
        counts: Ints = (tail.starts + tail.counts) // ratio - lows
        owners: Ints = np.repeat(np.arange(len(counts)), counts)
        ends = counts.cumsum()
        windows: Ints = np.arange(len(owners)) + np.repeat(lows - (ends - counts), counts)
        firsts: Ints = windows * ratio
        is_first = windows == 0
        parts: Ints = np.arange(-overlap, 1)[None, :, None] * ratio
        positions: Ints = firsts[:, None, None] + parts + np.arange(ratio)
        positions = np.where(positions < 0, positions + overlap * ratio, positions)
        row_pages, row_slots = tail.places(owners[:, None, None], positions)
        entry_pages, entry_slots = full.places(owners, firsts, ratio)
        return cls(
            count=len(owners),
            row_pages=on_device(row_pages, device),
            row_slots=on_device(row_slots, device),
            is_first=on_device(is_first, device),
            entry_pages=on_device(entry_pages, device),
            entry_slots=on_device(entry_slots, device),
            rotation=rotary(on_device(firsts, device)),
        )


@dataclass(frozen=True, slots=True)
class CompressorPlaces:
    """Where a compressor's rows, gates and entries are."""

    rows: TensorPlace
    gates: TensorPlace
    entries: TensorPlace


class Compressor:
    """`bias` is [ratio, series * size], `norm` [size], both float32.

    A row has a part for each window that its token's entries are made of: the first part is
    for the entry of the window after, if windows overlap, and the last for its own.
    """

    def __init__(
        self,
        bias: torch.Tensor,
        norm: torch.Tensor,
        norm_eps: float,
        places: CompressorPlaces,
    ) -> None:
        size = norm.shape[0]
        # [series, ratio, size], as rows are read back.
        self._bias = bias.view(bias.shape[0], -1, size).transpose(0, 1).contiguous()
        self._norm, self._norm_eps = norm, norm_eps
        self._places = places

    @property
    def tail(self) -> int:
        """The number of the group that holds rows and gates."""
        return self._places.rows.group

    def __call__(
        self,
        rows: torch.Tensor,
        gates: torch.Tensor,
        plan: GroupPlan,
        closings: Closings,
        store: PageStore,
    ) -> None:
        """Store `rows` and `gates` [tokens, series * size] of a launch, and the entries of the
        windows that it completes. `plan` is that of the tail pages.
        """
        series, _, size = self._bias.shape
        row_pages = store.tensor(self._places.rows.group, self._places.rows.index)
        gate_pages = store.tensor(self._places.gates.group, self._places.gates.index)
        row_pages[plan.write_pages, plan.write_slots] = rows.view(-1, series, size)
        gate_pages[plan.write_pages, plan.write_slots] = gates.view(-1, series, size)
        if closings.count == 0:
            return
        # [windows, series, ratio, size]: each part of an entry from its own window's rows.
        number = torch.arange(series, device=rows.device).view(1, -1, 1)
        places = closings.row_pages, closings.row_slots, number
        weights = gate_pages[places].add_(self._bias)
        if series > 1:
            weights[:, 0].masked_fill_(closings.is_first.view(-1, 1, 1), -torch.inf)
        weights = torch.softmax(weights.flatten(1, 2), 1)
        entries = row_pages[places].flatten(1, 2).float().mul_(weights).sum(1)
        entries = normalise(entries, self._norm_eps).mul_(self._norm).unsqueeze(1)
        rotate(entries[..., size - 2 * closings.rotation.shape[-1] :], closings.rotation)
        pages = store.tensor(self._places.entries.group, self._places.entries.index)
        pages[closings.entry_pages, closings.entry_slots] = entries.squeeze(1).to(pages.dtype)
