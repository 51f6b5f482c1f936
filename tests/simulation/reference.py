"""What a request needs, found by walking over its positions: no formula, no code of ours."""

from collections.abc import Sequence
from functools import lru_cache

from simulation.scripts import Script
from tidegate.ipc.protocol import Role
from tidegate.kvcache.layout import All, Group, Layout, Reach, Tail, Window

Pools = tuple[Role, Layout, Sequence[int]]


def reads(reach: Reach, query: int, position: int) -> bool:
    """Does the query read this position, which is not above it?"""
    match reach:
        case All():
            return True
        case Window(tokens=window):
            return query - position < window
        case Tail(ratio=ratio, overlap=overlap):
            return query // ratio - position // ratio <= overlap


class Walk:
    """A row that goes from position to position, and drops what no later query reads."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._first_reads: list[int] = []  # Of each query, the lowest position that it reads.
        self._most = [0]
        self._held: dict[int, int] = {}  # How many positions are held in each page.

    def first_read(self, query: int) -> int:
        """The lowest position that the query reads."""
        self._go_on(query + 1)
        return self._first_reads[query]

    def most(self, end: int) -> int:
        """The most pages that some query below `end` needs, its own position included."""
        self._go_on(end)
        return self._most[end]

    def _go_on(self, end: int) -> None:
        reach, page_tokens, held = self._group.reach, self._group.page_tokens, self._held
        low = self._first_reads[-1] if self._first_reads else 0
        for query in range(len(self._first_reads), end):
            held[query // page_tokens] = held.get(query // page_tokens, 0) + 1
            while not reads(reach, query, low):
                page = low // page_tokens
                held[page] -= 1
                if not held[page]:
                    del held[page]
                low += 1
            self._first_reads.append(low)
            self._most.append(max(self._most[-1], len(held)))


@lru_cache(maxsize=4096)
def walk_of(group: Group) -> Walk:
    return Walk(group)


def first_read(group: Group, position: int) -> int:
    """The lowest position that the query at `position` reads."""
    return walk_of(group).first_read(position)


def pages_between(group: Group, start: int, end: int) -> int:
    """How many pages hold positions [start, end)."""
    return len({position // group.page_tokens for position in range(start, end)})


def pages_to_reach(group: Group, end: int) -> int:
    """The most pages that some query in [0, end) needs, if old ones are given back."""
    return walk_of(group).most(end)


def pages_of_all(group: Group, end: int) -> int:
    """Pages for [0, end), if none is given back."""
    return walk_of(Group("", All(), group.page_tokens, ())).most(end)


def source_needs(layout: Layout, prompt: int) -> list[int]:
    return [
        pages_of_all(group, prompt)
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
