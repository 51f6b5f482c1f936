"""A slice of seeds: whole fleets in virtual time, with all that may go wrong."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from simulation.__main__ import run_seed
from simulation.crowds import CROWD_SEED_MIN
from simulation.outcome import Outcome, add
from simulation.overload import draw_any
from simulation.scenario import ALIKE_SEED_MIN, CANCEL_PHASES, TIGHT_SEED_MIN, Trouble, draw
from simulation.simulator import Simulator
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.phases import Phase

FOLDER = Path(__file__).parent
TIGHT_SLICES = [
    range(TIGHT_SEED_MIN + first, TIGHT_SEED_MIN + first + 30) for first in range(0, 90, 30)
]
SLICES = [range(first, first + 40) for first in range(0, 240, 40)]


def failed_seeds() -> list[int]:
    """Seeds that once failed: the first word of each line that is no comment."""
    lines = (FOLDER / "failed_seeds.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("seeds", SLICES, ids=[f"{s.start}-{s.stop}" for s in SLICES])
def test_whatever_goes_wrong_everything_ends_and_nothing_leaks(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed)


@pytest.mark.parametrize(
    "seeds", TIGHT_SLICES, ids=[f"+{s.start % 1000}" for s in TIGHT_SLICES]
)
def test_requests_that_give_way_to_others_and_begin_anew_all_end(seeds: range) -> None:
    total = Outcome()
    for seed in seeds:
        add(total, run_seed(seed))
    assert total.preemption_count > 10


def test_pages_that_rows_hold_ahead_go_to_those_who_need_them_now() -> None:
    total = Outcome()
    ahead = {"ahead_tokens": Tokens(8), "ahead_tokens_max": Tokens(64)}
    for seed in range(TIGHT_SEED_MIN + 3000, TIGHT_SEED_MIN + 3030):
        drawn = draw(seed)
        settings = msgspec.structs.replace(drawn.settings, **ahead)
        scenario = msgspec.structs.replace(drawn, settings=settings)
        add(total, Simulator(scenario).run())
    assert total.given_back_count > 50 and total.preemption_count > 10


def test_prompts_that_begin_alike_find_their_beginning_whatever_goes_wrong() -> None:
    total = Outcome()
    for seed in range(ALIKE_SEED_MIN, ALIKE_SEED_MIN + 60):
        add(total, run_seed(seed))
    assert total.cached_tokens > 300


def test_what_fits_passes_requests_that_wait_for_pages() -> None:
    """Each pass is compared with the bounds, and each other beginning with the order."""
    total = Outcome()
    for seed in range(CROWD_SEED_MIN, CROWD_SEED_MIN + 20):
        add(total, Simulator(draw_any(seed, troubles=())).run())
    assert total.pass_count > 50 and total.ended_early == 0
    for seed in range(CROWD_SEED_MIN + 20, CROWD_SEED_MIN + 40):
        add(total, run_seed(seed))
    assert total.pass_count > 100


def test_requests_of_lost_workers_begin_anew_and_are_complete_in_the_end() -> None:
    total = Outcome()
    for seed in range(TIGHT_SEED_MIN + 2000, TIGHT_SEED_MIN + 2040):
        add(total, Simulator(draw(seed, troubles=(Trouble.LOSS,))).run())
    assert total.restart_count > 5 and total.preemption_count > 10
    assert total.complete > total.ended_early


def test_seeds_that_once_failed_run_to_their_end() -> None:
    for seed in failed_seeds():
        run_seed(seed)


def test_when_nothing_goes_wrong_every_accepted_request_is_complete() -> None:
    total = Outcome()
    for seed in range(1000, 1060):
        add(total, Simulator(draw(seed, troubles=())).run())
    assert total.ended_early == 0
    assert total.complete > 300 and total.token_count > 2000


@pytest.mark.parametrize("trouble", list(Trouble))
def test_each_trouble_alone_ends_some_requests_early_and_harms_no_other(
    trouble: Trouble,
) -> None:
    total = Outcome()
    for seed in range(2000, 2025):
        add(total, Simulator(draw(seed, troubles=(trouble,))).run())
    assert total.ended_early > 0
    assert total.complete > total.ended_early


def test_requests_are_cancelled_in_every_phase_and_late_answers_come() -> None:
    total = Outcome()
    for seed in range(3000, 3060):
        add(total, Simulator(draw(seed, troubles=(Trouble.CANCEL,))).run())
    assert all(total.cancelled_in.get(phase, 0) > 5 for phase in CANCEL_PHASES)
    assert total.cancelled_in[Phase.WAITING] > 5
    assert total.stale_answer_count > 5


def trace_of(seed: int) -> list[str]:
    lines: list[str] = []
    Simulator(draw(seed), trace=lambda now_us, item: lines.append(f"{now_us} {item}")).run()
    return lines


def test_the_same_seed_gives_the_same_trace() -> None:
    first = trace_of(7)
    assert len(first) > 40
    assert trace_of(7) == first
    assert trace_of(8) != first


def test_no_order_of_a_set_reaches_a_trace() -> None:
    """Strings hash differently in each process, unless their seed is set."""
    digests = {
        subprocess.run(
            [sys.executable, "-m", "simulation", "--digest", "--seeds", "0:12"],
            env=os.environ
            | {
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    (digest,) = digests
    assert len(digest.splitlines()) == 12
