"""Prompts that move early, on fleets with room for it, in simulations of many seeds."""

from random import Random

import msgspec
import pytest

from simulation.outcome import Outcome, add
from simulation.scenario import ALIKE_SEED_MIN, Scenario, draw
from simulation.simulator import Simulator
from tidegate.ipc.protocol import Role
from tidegate.kvcache.layout import Tokens


def with_room(scenario: Scenario) -> Scenario:
    """The same run with more room where prompts are handed over, and in shorter chunks."""
    random = Random(f"{scenario.seed} room")
    workers = tuple(
        msgspec.structs.replace(
            worker,
            page_counts=tuple(count * random.choice([2, 3, 4]) for count in worker.page_counts),
            row_count=random.choice([2, 3, 4, 16]),
        )
        if worker.role is Role.DECODE
        else worker
        for worker in scenario.workers
    )
    settings = msgspec.structs.replace(
        scenario.settings, early_handoff=True, chunk_tokens=Tokens(random.choice([1, 2, 3, 5]))
    )
    return msgspec.structs.replace(scenario, workers=workers, settings=settings)


@pytest.mark.parametrize("seeds", [range(40), range(ALIKE_SEED_MIN, ALIKE_SEED_MIN + 30)])
def test_prompts_move_early_and_nobody_waits_for_it(seeds: range) -> None:
    total = Outcome()
    for seed in seeds:
        add(total, Simulator(with_room(draw(seed))).run())
    assert total.early_pull_count > 100
    assert 0 < total.early_lost_count < total.early_count


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1_000_000, ALIKE_SEED_MIN])
def test_prompts_move_early_whatever_goes_wrong(first: int) -> None:
    for seed in range(first + 100, first + 400):
        Simulator(with_room(draw(seed))).run()
