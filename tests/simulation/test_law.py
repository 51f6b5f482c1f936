"""The law: what the door accepts runs to its end on an idle fleet, and it refuses nothing else.

Here on layouts of small pages and windows, where every length is near an edge; see
`simulation.law` for what is asserted of each request.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from random import Random

import msgspec
import pytest

from simulation.known_layouts import layout_of, tail, window
from simulation.law import Case, Door, Trial, ever_needed, longest
from tidegate.ipc.protocol import Role
from tidegate.kvcache.layout import All, Layout, Reach

RANDOM_SEEDS = range(100)
OUTPUTS = (1, 2, 3, 4, 7)
STRIDE = 101  # Of the sweep's cases in the default run. A prime: no size is left out.
PART_COUNT = 8
AMPLE = 64  # Pages that hold whatever is asked for here.


def draw_case(random: Random) -> Case:
    """A layout of small pages and windows, and workers whose pools hold a few of them."""
    groups: list[tuple[str, Reach]] = [("full", All())]
    if random.random() < 0.8:
        groups.append(("window", window(random.randint(1, 7))))
    if random.random() < 0.3:
        groups.append(("tail", tail(random.randint(1, 4), random.randint(0, 2))))
    sizes = [random.randint(1, 4) for _ in groups]
    roles = random.choice(
        [[Role.PREFILL, Role.DECODE], [Role.BOTH], [Role.PREFILL, Role.DECODE, Role.BOTH]]
    )

    def counts() -> tuple[int, ...]:
        full = random.randint(1, 12 // sizes[0])
        return full, *(random.randint(1, 5) for _ in groups[1:])

    return Case(
        layout=layout_of(groups, sizes, random.random() < 0.6),
        pools=tuple((role, counts()) for role in roles),
        chunk=random.choice((None, 1, 3)),
        ahead=random.randint(1, 4),
    )


def lengths(case: Case) -> range:
    return range(1, longest(case) + 1)


def try_all(case: Case, outputs: Sequence[int | None]) -> Trial:
    trial = Trial(case)
    longest_prompt = 0
    for prompt, output in product(lengths(case), outputs):
        if trial.check(prompt, output) and output == 1:
            longest_prompt = prompt
    longest_accepted = trial.fleet.desk.core.longest_prompt()
    assert min(longest_accepted, longest(case)) == longest_prompt
    trial.end()
    return trial


def try_alike(case: Case) -> Trial:
    """Prompts of every length that share every number of tokens with those before them."""
    trial = Trial(msgspec.structs.replace(case, caches=True))
    for prompt, output in product(lengths(case), (1, 3)):
        for shared in range(prompt, -1, -1):
            trial.check(prompt, output, shared)
    trial.end()
    return trial


# --- Every length on random fleets ---


def test_accepted_requests_finish_and_refused_ones_could_not() -> None:
    accepted, refused = 0, 0
    for seed in RANDOM_SEEDS:
        trial = try_all(draw_case(Random(seed)), OUTPUTS)
        accepted += trial.accepted_count
        refused += trial.refused_count
    assert accepted > 500 and refused > 500


def test_an_absent_max_tokens_becomes_the_largest_that_is_accepted() -> None:
    trials = [try_all(draw_case(Random(seed)), (1, None)) for seed in RANDOM_SEEDS]
    assert sum(trial.accepted_count for trial in trials) > 500


def test_so_it_is_with_a_cache_whatever_prompts_have_in_common() -> None:
    trials = [try_alike(draw_case(Random(seed))) for seed in RANDOM_SEEDS[:50]]
    assert sum(trial.accepted_count for trial in trials) > 1000
    assert sum(trial.refused_count for trial in trials) > 500
    assert sum(trial.cached_tokens for trial in trials) > 1000


# --- A sweep of sizes ---


def sweep_layouts() -> Iterator[Layout]:
    for full, other, tokens, flag in product((1, 2, 3), (1, 2, 3), range(1, 6), (True, False)):
        groups = (("full", All()), ("window", window(tokens)))
        yield layout_of(groups, (full, other), flag)
    for full, other, ratio, overlap in product((1, 2), (1, 2, 3), (1, 2, 3), (0, 1, 2)):
        yield layout_of((("full", All()), ("tail", tail(ratio, overlap))), (full, other), True)
    for size, tokens, flag in product((1, 2, 3), range(1, 6), (True, False)):
        yield layout_of((("window", window(tokens)),), (size,), flag)


def sweep_cases(layout: Layout) -> Iterator[Case]:
    """Pools of unequal sides, each for 6 or 9 positions of the full group; of the others one
    page too few for ever, just enough for ever, or enough for 9 positions."""

    def counts(positions: int, kind: int) -> tuple[int, ...]:
        pages: list[int] = []
        for group in layout.groups:
            ever, whole = ever_needed(group), -(-positions // group.page_tokens)
            choice = (ever - 1, ever, -(-9 // group.page_tokens))[kind]
            pages.append(whole if ever == inf else max(1, int(choice)))
        return tuple(pages)

    sides = list(dict.fromkeys(counts(n, kind) for n, kind in product((6, 9), range(3))))
    for chunk in (None, 1, 3):
        for source, target in product(sides, sides):
            pools = ((Role.PREFILL, source), (Role.DECODE, target))
            yield Case(layout=layout, pools=pools, chunk=chunk, ahead=2)
        for side in sides:
            yield Case(layout=layout, pools=((Role.BOTH, side),), chunk=chunk, ahead=2)


def try_sweep(part: slice) -> None:
    cases = [case for layout in sweep_layouts() for case in sweep_cases(layout)]
    trials = [try_all(case, (1, 2, 3, 5, None)) for case in cases[part]]
    assert sum(trial.accepted_count for trial in trials) > 1000
    assert sum(trial.refused_count for trial in trials) > 500


def try_alike_sweep(part: slice) -> None:
    cases = [case for layout in sweep_layouts() for case in sweep_cases(layout)]
    trials = [try_alike(case) for case in cases[part]]
    assert sum(trial.accepted_count for trial in trials) > 1000
    assert sum(trial.cached_tokens for trial in trials) > 1000


def test_every_length_on_a_sweep_of_small_sizes() -> None:
    try_sweep(slice(0, None, STRIDE))


def test_every_length_and_shared_prefix_on_a_sweep_of_small_sizes() -> None:
    try_alike_sweep(slice(0, None, 2 * STRIDE))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PART_COUNT))
def test_every_length_on_every_case_of_the_sweep(part: int) -> None:
    try_sweep(slice(part, None, PART_COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PART_COUNT))
def test_every_length_and_shared_prefix_on_every_case_of_the_sweep(part: int) -> None:
    try_alike_sweep(slice(part, None, PART_COUNT))


# --- The pool that is named ---


def with_pages(case: Case, worker: int, group: int, count: int) -> Case:
    """The same fleet with ample pools, but for one."""
    pools = [(role, [AMPLE] * len(counts)) for role, counts in case.pools]
    pools[worker][1][group] = count
    named = tuple((role, tuple(counts)) for role, counts in pools)
    return msgspec.structs.replace(case, pools=named)


def test_a_refusal_names_the_pool_that_limits() -> None:
    """On a fleet with one way to run a request: that pool alone refuses it, whatever the others
    hold, and with the pages that it is said to need it does not."""
    named: set[str] = set()
    for seed in range(200):
        case = draw_case(Random(seed))
        if len(case.pools) > 2:
            continue
        door = Door(case)
        for prompt, output in product(lengths(case), (1, 2, 5)):
            refusal = door.refusal(prompt, output)
            if refusal is None:
                continue
            worker = int(refusal.worker.rpartition("-")[2])
            group = [group.name for group in case.layout.groups].index(refusal.pool)
            alone = with_pages(case, worker, group, refusal.limit)
            assert Door(alone).refusal(prompt, output) == refusal
            almost = with_pages(case, worker, group, refusal.needed - 1)
            still = Door(almost).refusal(prompt, output)
            assert still is not None and still.needed == refusal.needed
            larger = with_pages(case, worker, group, refusal.needed)
            assert Door(larger).refusal(prompt, output) is None
            named.add(f"{refusal.role} {refusal.pool}")
    assert named == {f"{r.value} {p}" for r in Role for p in ("full", "window", "tail")}


# --- Long prompts through small windows ---


@pytest.mark.parametrize("chunk", [None, 512])
def test_a_long_prompt_runs_through_a_window_pool_that_holds_a_tenth_of_it(
    chunk: int | None,
) -> None:
    layout = layout_of((("full", All()), ("window", window(512))), (16, 16), flag=True)
    counts = (320, 33)  # 5120 positions, and the floor of a window of 512.
    pools = ((Role.PREFILL, counts), (Role.DECODE, counts))
    trial = Trial(Case(layout=layout, pools=pools, chunk=chunk))
    for prompt, output in ((5120, 1), (5113, 8), (512, 40), (1, 600)):
        assert trial.check(prompt, output)
    for prompt, output in ((5121, 1), (5113, 9)):
        assert not trial.check(prompt, output)
