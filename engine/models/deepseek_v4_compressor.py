"""Compressed entries: one for a window of tokens, written when the window is complete.

1. Every token leaves a row and gates in the tail pages of its layer.
2. When a launch brings the last token of a window, the window's rows are read back, from
   whichever launch they came. If windows overlap, the part for the next entry goes to a page
   of its own, and that of the window before is read from there.
3. The entry is their sum, weighed by the softmax of gates and bias, normalised and rotated by
   the window's first position. It goes to the page of the window's tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tidegate.engine.attention_plan import GroupPlan, GroupSegments, Ints, on_device
from tidegate.engine.models.deepseek_v4_layout import TensorPlace
from tidegate.engine.models.parts import normalise
from tidegate.engine.models.rotary import Rotary, rotate
from tidegate.kvcache.page_store import PageStore

Places = tuple[torch.Tensor, torch.Tensor]  # Pages, and entries within them.


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Where each of n windows leaves what the next entry is made of, and where the window
    before has left it. Where there is none `is_first` [n] is set, and its own stands in.
    """

    own: Places
    before: Places
    is_first: torch.Tensor


@dataclass(frozen=True, slots=True)
class Closings:
    """The n windows that a launch completes, of all its segments, for layers of one kind.

    `rows` [n, ratio] are places in tail pages, `entries` [n] where the entries go. `overlaps`
    is None unless an entry is made of the window before too. `rotation` is for the windows'
    first positions.
    """

    count: int
    rows: Places
    entries: Places
    overlaps: Overlaps | None
    rotation: torch.Tensor

    @classmethod
    def of_launch(
        cls,
        tail: GroupSegments,
        overlap: GroupSegments | None,
        full: GroupSegments,
        ratio: int,
        rotary: Rotary,
        device: torch.device,
    ) -> "Closings":
        """Those of a launch with these segments, which are the same in all groups."""
        lows = tail.starts // ratio
        counts: Ints = (tail.starts + tail.counts) // ratio - lows
        owners: Ints = np.repeat(np.arange(len(counts)), counts)
        ends = counts.cumsum()
        windows: Ints = np.arange(len(owners)) + np.repeat(lows - (ends - counts), counts)
        firsts: Ints = windows * ratio

        def places(
            group: GroupSegments, owners: Ints, positions: Ints, tokens_per_entry: int
        ) -> Places:
            pages, slots = group.places(owners, positions, tokens_per_entry)
            return on_device(pages, device), on_device(slots, device)

        overlaps = None
        if overlap is not None:
            is_first = windows == 0
            before: Ints = np.where(is_first, firsts, firsts - ratio)
            overlaps = Overlaps(
                places(overlap, owners, firsts, ratio),
                places(overlap, owners, before, ratio),
                on_device(is_first, device),
            )
        return cls(
            count=len(owners),
            rows=places(tail, owners[:, None], firsts[:, None] + np.arange(ratio), 1),
            entries=places(full, owners, firsts, ratio),
            overlaps=overlaps,
            rotation=rotary(on_device(firsts, device)),
        )


@dataclass(frozen=True, slots=True)
class CompressorPlaces:
    """Where a compressor's rows, gates and entries are, and what windows leave to the next."""

    rows: TensorPlace
    gates: TensorPlace
    entries: TensorPlace
    overlap_rows: TensorPlace | None
    overlap_gates: TensorPlace | None


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
        self._bias = bias.view(bias.shape[0], -1, size)  # [ratio, series, size]
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

        Gates wait in the pool's type, all of them: so an entry does not depend on how its
        window was cut into launches.
        """
        _, series, size = self._bias.shape
        row_pages = _pages(store, self._places.rows)
        gate_pages = _pages(store, self._places.gates)
        row_pages[plan.write_pages, plan.write_slots] = rows.view(-1, series, size)
        gate_pages[plan.write_pages, plan.write_slots] = gates.view(-1, series, size).to(
            gate_pages.dtype
        )
        if closings.count == 0:
            return
        parts = row_pages[closings.rows]
        weights = gate_pages[closings.rows].float().add_(self._bias)
        # [windows, rows of an entry, size] from here on.
        if closings.overlaps is None:
            parts, weights = parts.squeeze(2), weights.squeeze(2)
        else:
            parts, weights = self._overlapped(parts, weights, closings.overlaps, store)
        weights = torch.softmax(weights, 1)
        entries = parts.float().mul_(weights).sum(1)
        entries = normalise(entries, self._norm_eps).mul_(self._norm).unsqueeze(1)
        rotate(entries[..., size - 2 * closings.rotation.shape[-1] :], closings.rotation)
        pages = _pages(store, self._places.entries)
        pages[closings.entries] = entries.squeeze(1).to(pages.dtype)

    def _overlapped(
        self, rows: torch.Tensor, gates: torch.Tensor, overlaps: Overlaps, store: PageStore
    ) -> Places:
        """Rows and gates that entries are made of: [windows, 2 * ratio, size], those of the
        window before first. `rows` and `gates` [windows, ratio, 2, size] are the windows' own.
        """
        kept = self._places.overlap_rows, self._places.overlap_gates
        found: list[torch.Tensor] = []
        for place, parts in zip(kept, (rows, gates), strict=True):
            assert place is not None, "windows that overlap have a place for it"
            pages = _pages(store, place)
            pages[overlaps.own] = parts[:, :, 0]
            found.append(torch.cat([pages[overlaps.before], parts[:, :, 1]], 1))
        rows, gates = found
        before = gates[:, : gates.shape[1] // 2]
        before.masked_fill_(overlaps.is_first.view(-1, 1, 1), -torch.inf)
        return rows, gates


def _pages(store: PageStore, place: TensorPlace) -> torch.Tensor:
    return store.tensor(place.group, place.index)
