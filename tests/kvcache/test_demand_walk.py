"""`demand` against a walk over positions, for every size up to those of real models.

The walk goes from position to position, drops what no later query reads, and counts pages in
a dictionary. It uses no formula, and none of the code that it is compared with.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from simulation.known_layouts import KNOWN, tail, window
from simulation.reference import Walk, first_read, pages_between
from tidegate.kvcache.demand import Lengths, Pace, Phase, demand
from tidegate.kvcache.layout import All, Group, Reach, Tail, Tokens, Window

WINDOWS = (1, 2, 3, 16, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 4095, 4096)
PAGES = (1, 2, 3, 15, 16, 17, 64, 100, 127, 128, 129, 255, 256)
TAILS = (
    (1, 0),
    (2, 1),
    (4, 0),
    (4, 1),
    (7, 2),
    (16, 1),
    (100, 0),
    (127, 1),
    (128, 0),
    (128, 1),
)
SMALL_TAILS = tuple(product(range(1, 10), range(3)))
PACES = (
    Pace(None, 1, Tokens(1)),
    Pace(Tokens(5), 2, Tokens(3)),
    Pace(Tokens(16), 1, Tokens(32)),
)


def group(reach: Reach, page_tokens: int) -> Group:
    return Group("g", reach, Tokens(page_tokens), ())


def small() -> Iterator[Group]:
    reaches: list[Reach] = [All(), *map(window, range(1, 25))]
    reaches += [tail(*each) for each in SMALL_TAILS]
    yield from (group(reach, size) for reach, size in product(reaches, range(1, 14)))


def large() -> list[Group]:
    reaches: list[Reach] = [All(), *map(window, WINDOWS)]
    reaches += [tail(*each) for each in TAILS]
    return [group(reach, size) for reach, size in product(reaches, PAGES)]


def known() -> Iterator[Group]:
    reaches = dict.fromkeys(reach for groups in KNOWN.values() for _, reach in groups)
    yield from (group(reach, size) for reach, size in product(reaches, (1, 8, 16, 128, 256)))


def last_end(each: Group) -> int:
    """Where nothing new comes: the query's reach has begun anywhere in a page."""
    match each.reach:
        case All():
            return 3 * each.page_tokens
        case Window(tokens=tokens):
            return tokens + 2 * each.page_tokens + 2
        case Tail(ratio=ratio, overlap=overlap):
            return min(ratio * (overlap + each.page_tokens + 1), 4096)


def check_floors(each: Group, ends: Sequence[int]) -> None:
    """For a request that ends there, by its prompt alone and by its output."""
    walk, pace = Walk(each), PACES[0]
    for end in ends:
        most = walk.most(end)
        prompt = Lengths(Tokens(end), Tokens(1))
        output = Lengths(Tokens(1), Tokens(end))
        for phase, lengths in ((Phase.PREFILL, prompt), (Phase.DECODE, output)):
            found = demand(each, phase, lengths, pace, whole_prompt=False)
            assert found.floor == most, (each, phase, end)


def check_handoff(each: Group, prompt: int) -> None:
    """It moves what the next query reads below the prompt's end."""
    walk = Walk(each)
    start = walk.first_read(prompt)
    found = demand(
        each, Phase.HANDOFF, Lengths(Tokens(prompt), Tokens(2)), PACES[0], whole_prompt=False
    )
    assert found.floor == found.target == pages_between(each, start, prompt)
    if isinstance(each.reach, Window):
        assert found.floor <= -(-(each.reach.tokens - 2) // each.page_tokens) + 1


def check_targets(each: Group, end: int) -> None:
    """At every settled position they hold what may be in flight: a row that runs ahead, and
    chunks in flight, each of which begins where the one before it ends."""
    for pace in PACES:
        in_flight = pace.chunks_in_flight * (end if pace.chunk is None else pace.chunk)
        prompt = Lengths(Tokens(end), Tokens(1))
        output = Lengths(Tokens(1), Tokens(end))
        for phase, lengths, ahead in (
            (Phase.PREFILL, prompt, in_flight),
            (Phase.DECODE, output, pace.ahead),
        ):
            target = demand(each, phase, lengths, pace, whole_prompt=False).target
            most = max(
                pages_between(each, first_read(each, n), min(end, n + ahead))
                for n in range(end)
            )
            assert most <= target <= pages_between(each, 0, end), (each, phase, end)


def test_floors_of_all_small_sizes_and_ends() -> None:
    for each in small():
        check_floors(each, range(1, min(80, last_end(each)) + 1))


def test_hand_offs_and_targets_of_small_sizes() -> None:
    for number, each in enumerate(small()):
        check_handoff(each, 1 + number % 60)
        check_targets(each, 1 + number % 41)


def test_floors_of_known_families_at_every_end() -> None:
    for each in known():
        check_floors(each, range(1, last_end(each) + 1))
        check_handoff(each, last_end(each))


@pytest.mark.parametrize("size", PAGES)
def test_floors_of_large_sizes_at_every_end(size: int) -> None:
    for each in large():
        if each.page_tokens == size:
            check_floors(each, range(1, last_end(each) + 1))
            check_handoff(each, last_end(each))
            check_targets(each, min(last_end(each), 150))
