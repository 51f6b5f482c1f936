"""`demand`: how many pages of each group a request needs, in each phase.

The pool sizer, the admission door, the planner and the allocator's assertions all use
this one function. A *floor* is the least with which the phase always makes progress, one
token at a time if need be; a *target* is what full speed uses.

Symbols: L prompt tokens, M max new tokens, W window, p page tokens, c chunk. A request's
keys and values cover positions [0, L + M - 1): the last token sampled is never fed back.
"""

from enum import Enum, auto
from functools import lru_cache
from itertools import accumulate
from math import lcm

import msgspec

from tidegate.kvcache.layout import (
    All,
    Group,
    Layout,
    Pages,
    Reach,
    Tail,
    Tokens,
    Window,
    page_count,
    span,
)
from tidegate.kvcache.layout import first_needed as first_needed_of


class Phase(Enum):
    """The stretch of a request's life for which pages are counted."""

    PREFILL = auto()
    HANDOFF = auto()
    DECODE = auto()


class Lengths(msgspec.Struct, frozen=True):
    """A request's size: `prompt` tokens L and `output` tokens M at most, both at least 1."""

    prompt: Tokens
    output: Tokens

    @property
    def end(self) -> Tokens:
        """One past the last position that is ever fed: L + M - 1."""
        return Tokens(self.prompt + self.output - 1)


class Pace(msgspec.Struct, frozen=True):
    """What targets depend on: `chunk` tokens (None for no budget), chunks in flight, and
    the `ahead` tokens that decode may run beyond its settled position."""

    chunk: Tokens | None
    chunks_in_flight: int
    ahead: Tokens


class Demand(msgspec.Struct, frozen=True):
    floor: Pages
    target: Pages


class Leg(Enum):
    """What of a request one worker runs."""

    SOURCE = "source"  # Prefill and hand-off, as the side that is copied from.
    TARGET = "target"  # Hand-off as the side that copies, then decode.
    WHOLE = "whole"  # Everything: role both, or a single token to sample.


PHASES: dict[Leg, tuple[Phase, ...]] = {
    Leg.SOURCE: (Phase.PREFILL, Phase.HANDOFF),
    Leg.TARGET: (Phase.HANDOFF, Phase.DECODE),
    Leg.WHOLE: (Phase.PREFILL, Phase.DECODE),
}


def demand(
    group: Group, phase: Phase, lengths: Lengths, pace: Pace, *, whole_prompt: bool
) -> Demand:
    """Pages of `group` resident for a request in `phase`.

    `whole_prompt` says that window pages of the prompt stay until they are handed off (see
    `keeps_windows`). It means nothing to other groups.
    """
    prompt_pages = group.pages(lengths.prompt)
    end_pages = group.pages(lengths.end)
    all_of_prompt = isinstance(group.reach, All) or (whole_prompt and group.is_window)
    match phase:
        case Phase.PREFILL if all_of_prompt:
            return Demand(prompt_pages, prompt_pages)
        case Phase.PREFILL:
            chunk = lengths.prompt if pace.chunk is None else pace.chunk
            ahead = Tokens(pace.chunks_in_flight * chunk)
            return _rolling(group, lengths.prompt, ahead)
        case Phase.HANDOFF if all_of_prompt:
            return Demand(prompt_pages, prompt_pages)
        case Phase.HANDOFF:
            moved = group.span(group.first_needed(lengths.prompt), lengths.prompt)
            return Demand(moved, moved)
        case Phase.DECODE if isinstance(group.reach, All):
            return Demand(end_pages, end_pages)
        case Phase.DECODE:
            return _rolling(group, lengths.end, pace.ahead)


def phases_of(leg: Leg, lengths: Lengths) -> tuple[Phase, ...]:
    """What a leg of a request of these lengths goes through, in order."""
    if leg is Leg.WHOLE and lengths.output == 1:
        return (Phase.PREFILL,)
    return PHASES[leg]


def keeps_windows(leg: Leg, flag: bool | None) -> bool:
    """Do window pages of the prompt stay until they are handed off, and are all moved?

    So it is when the flag `swa_only_transfer` is false and there is a hand-off.
    """
    return leg is not Leg.WHOLE and flag is False


def floor_of(group: Group, leg: Leg, lengths: Lengths, flag: bool | None) -> Pages:
    """The most pages of `group` that `leg` of a request needs at once to reach its end."""
    whole_prompt = keeps_windows(leg, flag)
    return max(
        demand(group, phase, lengths, _NO_PACE, whole_prompt=whole_prompt).floor
        for phase in phases_of(leg, lengths)
    )


def floors(layout: Layout, leg: Leg, lengths: Lengths) -> tuple[Pages, ...]:
    """`floor_of` for each group, in the layout's order."""
    flag = layout.swa_only_transfer
    return tuple(floor_of(group, leg, lengths, flag) for group in layout.groups)


def first_reserves(layout: Layout, leg: Leg, lengths: Lengths) -> tuple[Pages, ...]:
    """What a leg is promised when it begins, for each group in the layout's order.

    A prompt never stops half way for pages: it is promised its floor. Decode is promised one
    position beyond the prompt in groups that keep everything, and grows page by page from
    there; where old pages are given back its floor has a bound, and is promised.
    """
    if leg is Leg.SOURCE:
        return floors(layout, leg, lengths)
    begun = Tokens(min(lengths.end, lengths.prompt + 1))
    return tuple(
        group.pages(begun) if isinstance(group.reach, All) else floor
        for group, floor in zip(layout.groups, floors(layout, leg, lengths), strict=True)
    )


def targets(layout: Layout, leg: Leg, lengths: Lengths, pace: Pace) -> tuple[Pages, ...]:
    """What full speed uses, for each group: the largest target of the leg's phases."""
    whole_prompt = keeps_windows(leg, layout.swa_only_transfer)
    return tuple(
        max(
            demand(group, phase, lengths, pace, whole_prompt=whole_prompt).target
            for phase in phases_of(leg, lengths)
        )
        for group in layout.groups
    )


def longest_residency(reach: Reach, page_tokens: Tokens, ahead: Tokens) -> Pages:
    """The most pages that [first_needed(n), n + ahead) touches, over all n; ahead >= 1."""
    match reach:
        case All():
            raise AssertionError("the residency of a full group has no bound of its own")
        case Window(tokens=window):
            # ceil((W + ahead - 2) / p) + 1: the range holds W + ahead - 1 positions and may
            # begin anywhere in a page.
            return Pages(page_count(Tokens(window + ahead - 2), page_tokens) + 1)
        case Tail():
            return _tail_residencies(reach, page_tokens, ahead)[-1]


@lru_cache(maxsize=4096)
def _tail_residencies(reach: Tail, page_tokens: Tokens, ahead: Tokens) -> tuple[Pages, ...]:
    """Entry n: the most pages that [first_needed(m), m + ahead) touches, over m from 0 to n.

    first_needed moves in steps of the ratio; past the overlap the pattern repeats after
    lcm(ratio, page) positions, so the last entry holds for every position beyond.
    """
    period = lcm(reach.ratio, page_tokens)
    return tuple(
        accumulate(
            (
                span(first_needed_of(reach, Tokens(n)), Tokens(n + ahead), page_tokens)
                for n in range(reach.ratio * reach.overlap + period)
            ),
            max,
        )
    )


def _rolling(group: Group, end: Tokens, ahead: Tokens) -> Demand:
    """Demand of a group whose old pages are given back, for positions [0, end)."""
    reach, page_tokens = group.reach, group.page_tokens
    if isinstance(reach, Tail):
        # A short sequence may end before the tail straddles as many pages as it ever does.
        residencies = _tail_residencies(reach, page_tokens, Tokens(1))
        floor = residencies[min(end, len(residencies)) - 1]
    else:
        floor = min(group.pages(end), longest_residency(reach, page_tokens, Tokens(1)))
    target = group.pages(end)
    if ahead < end:
        fast = longest_residency(reach, page_tokens, Tokens(max(1, ahead)))
        target = Pages(min(target, fast))
    return Demand(floor, target)


_NO_PACE = Pace(chunk=Tokens(1), chunks_in_flight=1, ahead=Tokens(1))
