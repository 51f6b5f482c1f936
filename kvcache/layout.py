"""What a model keeps of each token: groups of layer tensors, their pages, and the flag.

A *group* is a set of layer tensors that share one page table and one pool of page ids.
Its `reach` says which earlier positions a query still reads; from that one function,
`first_needed`, everything else is derived: reclaim, hand-off range and residency.

Positions and counts of tokens are `Tokens`, counts and indices of pages are `Pages`.
All arithmetic that turns one into the other is in this module and in `demand`.
"""

from collections.abc import Iterable
from math import lcm
from typing import NewType

import msgspec

Tokens = NewType("Tokens", int)
Pages = NewType("Pages", int)
PageId = NewType("PageId", int)

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PAGE_TOKENS_MAX = Tokens(4096)


class LayoutError(ValueError):
    """A layout that cannot be served; the text names the field and what would be right."""


class All(msgspec.Struct, frozen=True, tag="all"):
    """Every earlier position is read: full attention, and compressed entries of it."""


class Window(msgspec.Struct, frozen=True, tag="window"):
    """The query's own position and the `tokens - 1` positions before it are read."""

    tokens: Tokens


class Tail(msgspec.Struct, frozen=True, tag="tail"):
    """The rows of the compression window not yet closed, and of `overlap` windows before it."""

    ratio: Tokens
    overlap: int


Reach = All | Window | Tail


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor that a group stores for one layer.

    `shape` is one entry's, for example (kv_heads, head_dim). An entry covers
    `tokens_per_entry` positions (1 but for compressed entries), which divides the page.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    dtype: str
    tokens_per_entry: int = 1

    @property
    def entry_bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


class Group(msgspec.Struct, frozen=True):
    """Layer tensors that share page ids. `name` is what a refusal calls the pool."""

    name: str
    reach: Reach
    page_tokens: Tokens
    tensors: tuple[TensorSpec, ...]

    @property
    def is_window(self) -> bool:
        return isinstance(self.reach, Window)

    @property
    def gives_back(self) -> bool:
        """Are old pages read no more as a row goes on?"""
        return not isinstance(self.reach, All)

    @property
    def window_tokens(self) -> Tokens | None:
        """How far back a window group reads, with the query itself; None for other groups."""
        return self.reach.tokens if isinstance(self.reach, Window) else None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: every tensor's entries for `page_tokens` positions."""
        return sum(spec.entry_bytes * self.entry_count(spec) for spec in self.tensors)

    @property
    def bytes_per_token(self) -> int:
        """What one position takes of a full page, rounded up to whole bytes."""
        return -(-self.page_bytes // self.page_tokens)

    def entry_count(self, spec: TensorSpec) -> int:
        """How many entries of one of the group's tensors a page holds."""
        return self.page_tokens // spec.tokens_per_entry

    def first_needed(self, position: Tokens) -> Tokens:
        """The lowest position that a query at `position` or later still reads. Monotone."""
        return first_needed(self.reach, position)

    def first_past(self, position: Tokens) -> Tokens | None:
        """The lowest query that reads nothing below `position`; None if each reads all."""
        return first_past(self.reach, position)

    def kept_bytes(self, length: Tokens) -> int:
        """Bytes of the whole entries below `length` that a query there or later still reads."""
        first = self.first_needed(length)
        return sum(
            spec.entry_bytes * whole_entries(first, length, spec.tokens_per_entry)
            for spec in self.tensors
        )

    @property
    def kept_bytes_max(self) -> int | None:
        """The most that `kept_bytes` is of any length; None for a group that keeps everything.

        A group that forgets keeps most just before its first positions are forgotten anew.
        """
        past = self.first_past(Tokens(1))
        return None if past is None else self.kept_bytes(Tokens(past - 1))

    def pages(self, tokens: Tokens) -> Pages:
        """How many pages hold positions [0, tokens)."""
        return page_count(tokens, self.page_tokens)

    def page_of(self, position: Tokens) -> Pages:
        """The index of the page that holds `position`."""
        return Pages(position // self.page_tokens)

    def start_of(self, page_index: Pages) -> Tokens:
        """The first position of the page with this index."""
        return Tokens(page_index * self.page_tokens)

    def span(self, start: Tokens, end: Tokens) -> Pages:
        """How many pages touch positions [start, end)."""
        return span(start, end, self.page_tokens)


class Layout(msgspec.Struct, frozen=True):
    """A model's groups, and whether window layers hand over their window only.

    `swa_only_transfer` is explicit data of the model: True when its decode reads nothing of
    a window layer below the window, so that out-of-window pages may be given back during
    prefill and need not be moved. None is allowed only without window groups.
    """

    groups: tuple[Group, ...]
    swa_only_transfer: bool | None

    def check(self) -> None:
        """Raise `LayoutError` unless this layout can be served."""
        if not self.groups:
            raise LayoutError("a layout needs at least one group")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise LayoutError(f"group names must differ, got {', '.join(names)}")
        for group in self.groups:
            _check_group(group)
        has_window = any(group.is_window for group in self.groups)
        if has_window and self.swa_only_transfer is None:
            raise LayoutError(
                "a model with window layers must state swa_only_transfer (true or false)"
            )
        if not has_window and self.swa_only_transfer is not None:
            raise LayoutError("swa_only_transfer applies only to models with window layers")

    def with_forced_flag(self, forced: bool | None) -> "Layout":
        """The layout under an operator's setting: None keeps the model's flag, False forces it.

        True is accepted only where the model declares it; raises `LayoutError` otherwise.
        """
        if forced is None or forced == self.swa_only_transfer:
            return self
        if self.swa_only_transfer is None:
            raise LayoutError("--swa-only-transfer: this model has no window layers")
        if forced:
            raise LayoutError(
                "--swa-only-transfer true: the model does not declare it, and "
                "only false can be forced"
            )
        return msgspec.structs.replace(self, swa_only_transfer=False)


def first_needed(reach: Reach, position: Tokens) -> Tokens:
    match reach:
        case All():
            return Tokens(0)
        case Window(tokens=window):
            return Tokens(max(0, position - window + 1))
        case Tail(ratio=ratio, overlap=overlap):
            return Tokens(max(0, (position // ratio - overlap) * ratio))


def first_past(reach: Reach, position: Tokens) -> Tokens | None:
    """The inverse of `first_needed`: the lowest n with first_needed(n) >= position > 0."""
    match reach:
        case All():
            return None
        case Window(tokens=window):
            return Tokens(position + window - 1)
        case Tail(ratio=ratio, overlap=overlap):
            return Tokens((-(-position // ratio) + overlap) * ratio)


def page_count(tokens: Tokens, page_tokens: Tokens) -> Pages:
    """How many pages hold positions [0, tokens)."""
    return Pages(-(-tokens // page_tokens))


def token_capacity(pages: Pages, page_tokens: Tokens) -> Tokens:
    """How many positions this many pages hold."""
    return Tokens(pages * page_tokens)


def whole_pages_end(groups: Iterable[Group], position: Tokens) -> Tokens:
    """The highest position up to `position` where a page ends in each group; 0 without any."""
    sizes = [group.page_tokens for group in groups]
    return Tokens(position // lcm(*sizes) * lcm(*sizes) if sizes else 0)


def page_of_entries(page_tokens: Tokens, tokens_per_entry: Iterable[int]) -> Tokens:
    """The smallest page of at least `page_tokens` that holds whole entries of every size."""
    unit = lcm(*tokens_per_entry)
    return Tokens(-(-page_tokens // unit) * unit)


def span(start: Tokens, end: Tokens, page_tokens: Tokens) -> Pages:
    """How many pages touch positions [start, end); none when the range is empty."""
    if start >= end:
        return Pages(0)
    return Pages((end - 1) // page_tokens - start // page_tokens + 1)


def whole_entries(start: Tokens, end: Tokens, tokens_per_entry: int) -> int:
    """How many entries of so many positions each lie in positions [start, end) as a whole."""
    return max(0, end // tokens_per_entry - -(-start // tokens_per_entry))


def _check_group(group: Group) -> None:
    if not group.name:
        raise LayoutError("a group needs a name")
    if not 1 <= group.page_tokens <= PAGE_TOKENS_MAX:
        raise LayoutError(
            f"page_tokens of group {group.name!r} must be 1 to {PAGE_TOKENS_MAX}, "
            f"got {group.page_tokens}"
        )
    match group.reach:
        case Window(tokens=window) if window < 1:
            raise LayoutError(f"the window of group {group.name!r} must be at least 1 token")
        case Tail(ratio=ratio, overlap=overlap) if ratio < 1 or overlap < 0:
            raise LayoutError(
                f"the tail of group {group.name!r} needs ratio >= 1, overlap >= 0"
            )
        case _:
            pass
    if not group.tensors:
        raise LayoutError(f"group {group.name!r} needs at least one tensor")
    for spec in group.tensors:
        if not spec.shape or min(spec.shape) < 1:
            raise LayoutError(f"tensor {spec.name!r} has the empty shape {spec.shape}")
        if spec.dtype not in DTYPE_BYTES:
            raise LayoutError(f"tensor {spec.name!r} has the unknown dtype {spec.dtype!r}")
        if spec.tokens_per_entry < 1 or group.page_tokens % spec.tokens_per_entry:
            raise LayoutError(
                f"tensor {spec.name!r} has one entry per {spec.tokens_per_entry} tokens, "
                f"which must divide the page of {group.page_tokens} tokens"
            )
