"""The law on layouts of every known family, with pools so small that edges are near.

Page sizes are drawn for each group, pools for each worker: below the floor of a window, at it,
above it, or for all of the longest prompt. Lengths are those near edges.
"""

from random import Random

import pytest

from simulation.known_layouts import KNOWN, layout_of
from simulation.law import Case, Trial, ever_needed, requests_near
from tidegate.engine.models.layouts import FAMILY_LAYOUTS
from tidegate.ipc.protocol import Role
from tidegate.kvcache.layout import Layout, Window

PAGE_TOKENS = (1, 2, 3, 5, 8, 16, 17, 64, 128, 256)
WINDOW_PAGES_MAX = 300  # A window of more pages takes minutes where it moves page by page.
ROLES = (
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.DECODE),
    (Role.BOTH,),
    (Role.PREFILL, Role.DECODE, Role.BOTH),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
)


def draw_case(name: str, random: Random) -> Case:
    groups = KNOWN[name]
    windows = [reach.tokens for _, reach in groups if isinstance(reach, Window)]
    widest = max(windows, default=60)
    allowed = [size for size in PAGE_TOKENS if widest <= WINDOW_PAGES_MAX * size]
    sizes = [random.choice(allowed) for _ in groups]
    if random.random() < 0.5:
        sizes = [sizes[0]] * len(groups)
    layout = layout_of(groups, sizes, random.random() < 0.6)
    prompt = random.randint(widest // 2, 5 * widest // 2)
    pools = [(role, draw_counts(layout, prompt, random)) for role in random.choice(ROLES)]
    chunks = (None, None, widest // 16 + 1, widest // 3 + 1, widest, widest + 1, 2 * widest)
    return Case(
        layout=layout,
        pools=tuple(pools),
        chunk=random.choice(chunks),
        ahead=random.choice((1, 3, 8, 32)),
        default_max_tokens=random.choice((1, 2, 9, 40)),
        caches=random.random() < 0.6,
    )


def draw_counts(layout: Layout, prompt: int, random: Random) -> tuple[int, ...]:
    """Pages of each group on one worker."""
    counts: list[float] = []
    for group in layout.groups:
        ever, whole = ever_needed(group), -(-prompt // group.page_tokens)
        if ever > prompt:
            counts.append(random.randint(whole // 2, whole))
        else:
            counts.append(random.choice((ever - 1, ever, ever, ever + 1, 1.5 * ever, whole)))
    return tuple(max(1, int(count)) for count in counts)


def try_cases(name: str, seeds: range, request_count: int) -> tuple[int, int]:
    accepted, refused = 0, 0
    for seed in seeds:
        random = Random(f"{name} {seed}")
        case = draw_case(name, random)
        trial = Trial(case)
        widest = max(g.window_tokens or 0 for g in case.layout.groups)
        count = request_count // (1 + widest // 512)
        for request in requests_near(case, random, count):
            trial.check(*request)
        trial.end()
        accepted += trial.accepted_count
        refused += trial.refused_count
    return accepted, refused


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_accepted_runs_to_its_end_and_nothing_else_is_refused(name: str) -> None:
    accepted, refused = try_cases(name, range(10), 30)
    assert accepted > 15 and refused > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("first", range(1000, 1200, 50))
def test_so_it_is_on_fifty_more_fleets(name: str, first: int) -> None:
    accepted, refused = try_cases(name, range(first, first + 50), 150)
    assert accepted > 300 and refused > 50


def test_every_family_that_is_served_reads_as_a_known_one_does() -> None:
    known = [[type(reach).__name__.lower() for _, reach in groups] for groups in KNOWN.values()]
    for terms in FAMILY_LAYOUTS.values():
        assert [group.reach for group in terms.groups] in known
