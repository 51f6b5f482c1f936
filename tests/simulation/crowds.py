"""Fleets on which large prompts wait for pages that small ones leave: some are passed."""

from random import Random

import msgspec

from simulation.scenario import Arrival, Scenario, WorkerPlan
from tidegate.ipc.protocol import Role
from tidegate.kvcache.demand import Leg, Lengths, floors
from tidegate.kvcache.layout import All, Layout, Tokens

CROWD_SEED_MIN = 4_000_000  # Seeds from here on draw such fleets.
ROWS = 16
REQUEST_COUNT = 30
SPREAD_US = 20_000


def crowd(scenario: Scenario, random: Random) -> Scenario:
    """The same fleet with rows for many and pages for one of the largest prompts and a few of
    the small ones, which are most of them. Troubles are as before."""
    scripts = [arrival.script for arrival in scenario.arrivals]
    prompt_max = 8 + max(script.prompt_tokens for script in scripts)
    output_max = max(script.max_tokens or 1 for script in scripts)
    largest = Lengths(Tokens(prompt_max), Tokens(output_max))
    arrivals: list[Arrival] = []
    for number in range(REQUEST_COUNT):
        arrival = random.choice(scenario.arrivals)
        is_large = random.random() < 0.25
        script = msgspec.structs.replace(
            arrival.script,
            number=number,
            prompt_tokens=random.randint(prompt_max // 2, prompt_max)
            if is_large
            else random.randint(1, prompt_max // 6),
            max_tokens=random.randint(1, output_max if is_large else 3),
            priority=random.choice((0, 0, 0, 0, 1)),
        )
        arrivals.append(
            msgspec.structs.replace(arrival, at_us=random.randrange(SPREAD_US), script=script)
        )
    settings = msgspec.structs.replace(
        scenario.settings,
        handoff_waiting_count_max=16,
        waiting_count_max=1000,
        bypass_count_max=random.choice((0, 1, 2, 4, 8)),
        bypass_tokens_max=random.choice((50, 400, 10_000)),
    )
    return msgspec.structs.replace(
        scenario,
        seed=CROWD_SEED_MIN + scenario.seed,
        settings=settings,
        workers=tuple(
            _crowded(random, worker, scenario.layout, largest) for worker in scenario.workers
        ),
        arrivals=tuple(arrivals),
    )


def _crowded(
    random: Random, worker: WorkerPlan, layout: Layout, largest: Lengths
) -> WorkerPlan:
    leg = {Role.PREFILL: Leg.SOURCE, Role.DECODE: Leg.TARGET, Role.BOTH: Leg.WHOLE}[worker.role]
    counts = [
        need + random.randint(0, 1 + need // 2) if isinstance(group.reach, All) else ROWS * need
        for group, need in zip(layout.groups, floors(layout, leg, largest), strict=True)
    ]
    return msgspec.structs.replace(worker, page_counts=tuple(counts), row_count=ROWS)
