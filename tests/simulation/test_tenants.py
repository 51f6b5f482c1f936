"""Shares of tenants with backlogs, from whole fleets in virtual time."""

from collections import Counter

import pytest

from simulation.tenants import COST_MAX, Send, TenantRun

LATE_US = 3_000_000
TEN_TO_ONE = (Send("busy", 250), Send("calm", 25))


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_that_sends_ten_times_as_much_is_served_no_more(seed: int) -> None:
    run = TenantRun(TEN_TO_ONE, seed)
    last = run.places("calm")[-1]  # Until then both have requests waiting.
    served = run.served(0, last)
    difference = run.difference_max("busy", "calm", last)
    assert difference <= run.bound("busy", "calm")
    assert run.bound("busy", "calm") < 2 * served["calm"]  # Ten times as much would break it.
    # The bound is for the worst sizes in the worst order.
    assert difference <= 4 * COST_MAX


@pytest.mark.parametrize("seed", range(3))
def test_first_come_first_served_gives_it_ten_times_as_much(seed: int) -> None:
    """The same arrivals where the scheduler is not told who sends: what shares are for."""
    run = TenantRun(TEN_TO_ONE, seed, are_apart=False)
    served = run.served(0, run.places("calm")[-1])
    assert served["busy"] > 8 * served["calm"]


@pytest.mark.parametrize("seed", range(3))
def test_weights_are_shares(seed: int) -> None:
    run = TenantRun([Send("a", 80), Send("b", 200)], seed, {"b": 3.0})
    both = min(run.places(tenant)[-1] for tenant in "ab")
    served = run.served(0, both)
    assert abs(served["a"] - served["b"] / 3) <= run.bound("a", "b")
    counts = Counter(begun.tenant for begun in run.begun[:both])
    assert counts["b"] == pytest.approx(3 * counts["a"], rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_a_third_tenant_that_arrives_late_has_its_share_at_once(seed: int) -> None:
    run = TenantRun([Send("busy", 120), Send("calm", 100), Send("late", 20, LATE_US)], seed)
    first, last = run.places("late")[0], run.places("late")[-1]
    arrived = next(i for i, one in enumerate(run.begun) if one.at_us >= LATE_US)
    assert {"busy", "calm"} <= {one.tenant for one in run.begun[last:]}  # Both wait so long.
    assert first - arrived <= 2
    served = run.served(arrived, last)
    assert served["late"] / sum(served.values()) == pytest.approx(1 / 3, abs=0.05)
