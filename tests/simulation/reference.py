"""What a request needs, found by walking over its positions: no formula, no code of ours."""

from collections.abc import Sequence
from functools import lru_cache

from simulation.scripts import Script
from tidegate.ipc.protocol import Role
from tidegate.kvcache.layout import All, Group, Layout, Reach, Tail, Window

Pools = tuple[Role, Layout, Sequence[int]]


@lru_cache(maxsize=200_000)
def first_read(reach: Reach, position: int) -> int:
    """The lowest position that the query at `position` reads."""
    match reach:
        case All():
            return 0
        case Window(tokens=window):
            return next(p for p in range(position + 1) if position - p < window)
        case Tail(ratio=ratio, overlap=overlap):
            closed = [p for p in range(0, position + 1) if p % ratio == 0]
            return closed[max(0, len(closed) - 1 - overlap)]


@lru_cache(maxsize=200_000)
def pages_of_query(group: Group, query: int) -> int:
    """How many pages hold what this query reads, its own position included."""
    return pages_between(group, first_read(group.reach, query), query + 1)


def pages_between(group: Group, start: int, end: int) -> int:
    """How many pages hold positions [start, end)."""
    return len({position // group.page_tokens for position in range(start, end)})


def pages_to_reach(group: Group, end: int) -> int:
    """The most pages that some query in [0, end) needs, if old ones are given back."""
    return max(pages_of_query(group, query) for query in range(end))


def source_needs(layout: Layout, prompt: int) -> list[int]:
    return [
        pages_between(group, 0, prompt)
        if layout.swa_only_transfer is False and isinstance(group.reach, Window)
        else pages_to_reach(group, prompt)
        for group in layout.groups
    ]


def target_needs(layout: Layout, prompt: int, end: int) -> list[int]:
    """As if the prompt's own queries ran there too: so a longer prompt never needs less."""
    return [
        max(keep, reach)
        for keep, reach in zip(
            source_needs(layout, prompt), whole_needs(layout, end), strict=True
        )
    ]


def whole_needs(layout: Layout, end: int) -> list[int]:
    return [pages_to_reach(group, end) for group in layout.groups]


def may_ever_run(fleet: Sequence[Pools], script: Script, default_max_tokens: int) -> bool:
    """Could some choice of workers run the request to its end, one token at a time?"""
    prompt = script.prompt_tokens
    output = script.max_tokens
    if output is None:
        output = min(2, default_max_tokens)
    end = prompt + output - 1

    def holds(pools: Pools, needs: list[int]) -> bool:
        return all(need <= count for need, count in zip(needs, pools[2], strict=True))

    for pools in fleet:
        is_whole = pools[0] is Role.BOTH or (output == 1 and pools[0] is Role.PREFILL)
        if is_whole and holds(pools, whole_needs(pools[1], end)):
            return True
    if output == 1:
        return False
    has_source = any(
        holds(pools, source_needs(pools[1], prompt))
        for pools in fleet
        if pools[0] is Role.PREFILL
    )
    has_target = any(
        holds(pools, target_needs(pools[1], prompt, end))
        for pools in fleet
        if pools[0] is Role.DECODE
    )
    return has_source and has_target
