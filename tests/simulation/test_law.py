"""The law: what the door accepts runs to its end on an idle fleet, and it refuses nothing else.

That nothing else is refused is judged by a walk over positions (`simulation.reference`), which
the desk asks about each request.
"""

from itertools import product
from random import Random

import pytest

from simulation.instant import InstantFleet
from tidegate.ipc.protocol import EndReason, Role
from tidegate.kvcache.layout import All, Group, Layout, Reach, Tail, Tokens, Window
from tidegate.scheduler.commands import FinishRequest, RefuseRequest
from tidegate.scheduler.settings import CoreSettings

LAYOUT_SEEDS = range(150)
OUTPUTS = (1, 2, 3, 4, 7)


def group(name: str, reach: Reach, page_tokens: int) -> Group:
    return Group(name, reach, Tokens(page_tokens), ())


def draw_fleet(random: Random) -> tuple[Layout, list[tuple[Role, tuple[int, ...]]]]:
    """A layout of small pages and windows, and workers whose pools hold a few of them."""
    groups = [group("full", All(), random.randint(1, 4))]
    if random.random() < 0.8:
        groups.append(
            group("window", Window(Tokens(random.randint(1, 7))), random.randint(1, 4))
        )
    if random.random() < 0.3:
        tail = Tail(Tokens(random.randint(1, 4)), random.randint(0, 1))
        groups.append(group("tail", tail, random.randint(1, 4)))
    has_window = any(g.is_window for g in groups)
    layout = Layout(tuple(groups), random.random() < 0.6 if has_window else None)
    roles = random.choice(
        [[Role.PREFILL, Role.DECODE], [Role.BOTH], [Role.PREFILL, Role.DECODE, Role.BOTH]]
    )

    def counts() -> tuple[int, ...]:
        full = random.randint(1, 12 // groups[0].page_tokens)
        return full, *(random.randint(1, 5) for _ in groups[1:])

    return layout, [(role, counts()) for role in roles]


def longest(pools: list[tuple[Role, tuple[int, ...]]], layout: Layout) -> int:
    """Two positions more than the largest full pool holds."""
    return max(counts[0] for _, counts in pools) * layout.groups[0].page_tokens + 2


@pytest.mark.parametrize("chunk", [None, 1, 3], ids=["whole", "chunk-1", "chunk-3"])
def test_accepted_requests_finish_and_refused_ones_could_not(chunk: int | None) -> None:
    accepted, refused = 0, 0
    for seed in LAYOUT_SEEDS:
        layout, pools = draw_fleet(Random(seed))
        settings = CoreSettings(
            chunk_tokens=None if chunk is None else Tokens(chunk),
            ahead_tokens=Tokens(1 + seed % 4),
        )
        fleet = InstantFleet(layout, pools, settings, checks=False)
        longest_prompt = 0
        for prompt, output in product(range(1, longest(pools, layout) + 1), OUTPUTS):
            answer = fleet.run(prompt, output)
            if isinstance(answer, FinishRequest):
                assert answer.reason is EndReason.LENGTH
                assert answer.usage.output_tokens == output
                accepted += 1
                if output == 1:
                    longest_prompt = prompt
            else:
                assert answer.status == 400 and answer.needed > answer.limit
                refused += 1
        fleet.desk.core.check()
        assert fleet.desk.core.longest_prompt() == longest_prompt
    assert accepted > 500 and refused > 500


def test_an_absent_max_tokens_becomes_the_largest_that_is_accepted() -> None:
    checked = 0
    for seed in LAYOUT_SEEDS:
        layout, pools = draw_fleet(Random(seed))
        fleet = InstantFleet(layout, pools, CoreSettings(default_max_tokens=9), checks=False)
        for prompt in range(1, longest(pools, layout) + 1):
            answer = fleet.run(prompt, None)
            fits = [
                output
                for output in range(2, 10)
                if isinstance(fleet.run(prompt, output), FinishRequest)
            ]
            if isinstance(answer, FinishRequest):
                assert answer.usage.output_tokens == max(fits)
                checked += 1
            else:
                assert not fits
    assert checked > 100


@pytest.mark.parametrize("chunk", [None, 512])
def test_a_long_prompt_runs_through_a_window_pool_that_holds_a_tenth_of_it(
    chunk: int | None,
) -> None:
    layout = Layout((group("full", All(), 16), group("window", Window(Tokens(512)), 16)), True)
    counts = (320, 33)  # 5120 positions, and the floor of a window of 512.
    settings = CoreSettings(chunk_tokens=None if chunk is None else Tokens(chunk))
    pools = [(Role.PREFILL, counts), (Role.DECODE, counts)]
    fleet = InstantFleet(layout, pools, settings)
    for prompt, output in ((5120, 1), (5113, 8), (512, 40), (1, 600)):
        answer = fleet.run(prompt, output)
        assert isinstance(answer, FinishRequest) and answer.usage.output_tokens == output
    for prompt, output in ((5121, 1), (5113, 9)):
        refused = fleet.run(prompt, output)
        assert isinstance(refused, RefuseRequest)
        assert (refused.pool, refused.needed, refused.limit) == ("full", 321, 320)
