"""Fleets in virtual time around the real core: when tokens come, and how requests end."""

import pytest

from fakes.benchmark_fleets import COSTS, core, run, workers
from goodput import Ending
from tidegate.ipc.protocol import Role


def test_the_first_token_comes_when_the_prompt_is_run_and_the_others_step_by_step() -> None:
    found = run(core(), workers([Role.BOTH], 64, 16), (5000, 40, 6))
    (fate,) = found.fates
    # Chunks of 16, 16 and 8; the last one samples. Then 5 steps of one row.
    assert fate.ttft_us == 3 * 100 + 40 * 10 + 50 + 1
    assert fate.tpot_us == 100 + 50 + 1
    assert (fate.ending, fate.token_count) == (Ending.COMPLETE, 6)
    assert found.last_us == 5000 + 751 + 5 * 151
    assert found.busy_share == {"both-0": (751 + 5 * 151) / found.last_us}


@pytest.mark.parametrize(("early_handoff", "page_count"), [(False, 10 + 2), (True, 2 + 2)])
def test_a_hand_off_takes_as_long_as_the_bytes_that_are_left(
    early_handoff: bool, page_count: int
) -> None:
    fleet = workers([Role.PREFILL, Role.DECODE], 64, 16)
    (fate,) = run(core(early_handoff=early_handoff), fleet, (0, 40, 6)).fates
    # 10 pages of the full pool and 2 of the window's, 40 bytes each, at 2 bytes a microsecond.
    # Of the full pool those of two chunks are there when the third is done.
    assert fate.first_us is not None and fate.last_us is not None
    pull_us = COSTS.copy_us(page_count * 40)
    assert fate.last_us - fate.first_us == pytest.approx(pull_us + 5 * 151, abs=21)
    assert fate.ending is Ending.COMPLETE


@pytest.mark.parametrize("roles", [[Role.BOTH] * 2, [Role.PREFILL, Role.DECODE]])
def test_every_request_ends_whole_however_fast_they_come(roles: list[Role]) -> None:
    requests = [(n * 1000, 8 + n * 7 % 90, 1 + n % 23) for n in range(60)]
    fleet = workers(roles, 32, 10)
    for speed in (0.1, 1, 1000):
        found = run(core(), fleet, *requests, speed=speed)
        for (_, _, output), fate in zip(requests, found.fates, strict=True):
            assert (fate.ending, fate.token_count) == (Ending.COMPLETE, output)
        assert 0 < max(found.busy_share.values()) <= 1
    assert sum(fate.preemption_count for fate in found.fates) > 0, "the pools are too large"


def test_speed_moves_arrivals_and_nothing_else() -> None:
    slow, fast = (
        run(core(), workers([Role.BOTH], 64, 16), (8000, 40, 6), speed=speed).fates[0]
        for speed in (1, 4)
    )
    assert (slow.at_us, fast.at_us) == (8000, 2000)
    assert (slow.ttft_us, slow.tpot_us) == (fast.ttft_us, fast.tpot_us)


def test_what_never_fits_is_refused_and_what_would_come_too_late_is_given_up() -> None:
    requests = (0, 1000, 1), *((n, 100, 20) for n in range(8))
    found = run(core(), workers([Role.BOTH], 32, 16), *requests, timeout_ms=4)
    endings = [fate.ending for fate in found.fates]
    assert endings[:2] == [Ending.REFUSED, Ending.COMPLETE]
    assert endings[-1] is Ending.GIVEN_UP
