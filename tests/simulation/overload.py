"""Several times more requests than a fleet can serve; some give way for no reason at all."""

from collections.abc import Sequence
from random import Random

import msgspec

from simulation.crowds import CROWD_SEED_MIN, crowd
from simulation.scenario import (
    ALIKE_SEED_MIN,
    QUEUE_US,
    TIGHT_SEED_MIN,
    Arrival,
    Scenario,
    Trouble,
    WorkerPlan,
    draw,
)
from tidegate.ipc.protocol import Role

LOAD_SEED_MIN = 3_000_000  # Seeds from here on draw fleets with too much to do.
ROWS_AT_ONCE = 3  # On pools this tight no more rows decode for long.


def draw_any(seed: int, troubles: tuple[Trouble, ...] | None = None) -> Scenario:
    """The scenario of any seed. `troubles` replaces the seed's own choice of them."""
    if seed >= CROWD_SEED_MIN:
        return crowd(draw(seed - CROWD_SEED_MIN, troubles), Random(seed))
    number = seed - LOAD_SEED_MIN
    if number < 0:
        return draw(seed, troubles)
    first = ALIKE_SEED_MIN if number % 3 == 0 else TIGHT_SEED_MIN
    return _overload(draw(first + number, troubles), Random(seed))


def _overload(scenario: Scenario, random: Random) -> Scenario:
    """The same fleet with many more requests of the same kinds, and troubles as before.

    In some the queue is short, or its timeout: then requests are refused, or end with that as
    the reason.
    """
    count = random.choice((40, 70, 110))
    arrivals = [_like(scenario.arrivals, number, random) for number in range(count)]
    served_us = _time_to_serve_us(scenario.workers, arrivals)
    spread_us = 1 + served_us // random.choice((3, 5, 8))
    settings = msgspec.structs.replace(
        scenario.settings,
        queue_timeout_us=random.choice((QUEUE_US, QUEUE_US, served_us, 1 + served_us // 4)),
        waiting_count_max=random.choice((5, 30, 1000, 1000)),
    )
    return msgspec.structs.replace(
        scenario,
        seed=LOAD_SEED_MIN + scenario.seed,
        settings=settings,
        arrivals=tuple(
            msgspec.structs.replace(arrival, at_us=random.randrange(spread_us))
            for arrival in arrivals
        ),
        preempt_share=random.choice((0.0, 0.0, 0.02, 0.2)),
    )


def _like(arrivals: Sequence[Arrival], number: int, random: Random) -> Arrival:
    """Another request of the kind of one of these, with lengths of its own."""
    arrival = random.choice(arrivals)
    prompt_max = max(each.script.prompt_tokens for each in arrivals)
    output_max = max(each.script.max_tokens or 1 for each in arrivals)
    script = msgspec.structs.replace(
        arrival.script,
        number=number,
        prompt_tokens=random.randint(1, prompt_max),
        max_tokens=None if random.random() < 0.1 else random.randint(1, output_max),
        priority=random.choice((0, 0, 0, 1, 5, -3)),
    )
    return msgspec.structs.replace(arrival, script=script)


def _time_to_serve_us(workers: Sequence[WorkerPlan], arrivals: Sequence[Arrival]) -> int:
    """About how long the fleet takes for all of them."""
    launches = sum(arrival.script.max_tokens or 1 for arrival in arrivals)
    decoding = [worker for worker in workers if worker.role is not Role.PREFILL]
    if not decoding:
        return len(arrivals) * max(worker.launch_us for worker in workers)
    rows = sum(min(ROWS_AT_ONCE, worker.row_count) for worker in decoding)
    return 1 + launches * max(worker.launch_us for worker in decoding) // (2 * rows)
