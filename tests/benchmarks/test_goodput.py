"""Goodput: who is met, how the others are counted, and the speed up to which it lasts."""

import pytest

from goodput import Ending, Fate, Limits, percentile, score, speed_at

LIMITS = Limits(ttft_us=1000, tpot_us=10)


def fate(
    *,
    ttft_us: int = 1000,
    gap_us: int = 10,
    token_count: int = 5,
    ending: Ending = Ending.COMPLETE,
) -> Fate:
    first_us = 7 + ttft_us
    last_us = first_us + gap_us * (token_count - 1)
    return Fate(7, 5, first_us, last_us, token_count, 0, True, ending)


def test_limits_may_be_reached_and_not_passed() -> None:
    assert LIMITS.are_met(fate())
    assert not LIMITS.are_met(fate(ttft_us=1001))
    assert not LIMITS.are_met(fate(gap_us=11))


def test_a_single_token_has_no_gap() -> None:
    one = Fate(0, 1, 500, 500, 1, 0, True, Ending.COMPLETE)
    assert one.tpot_us == 0 and LIMITS.are_met(one)


@pytest.mark.parametrize("ending", [each for each in Ending if each is not Ending.COMPLETE])
def test_whoever_does_not_come_to_the_end_is_not_met(ending: Ending) -> None:
    assert not LIMITS.are_met(fate(ending=ending))


def test_an_output_that_is_cut_short_is_not_met() -> None:
    assert not LIMITS.are_met(fate(token_count=4))


def test_a_score_counts_each_request_once() -> None:
    fates = [
        fate(),
        fate(ttft_us=2000, gap_us=99),  # Beyond both: late.
        fate(gap_us=99),
        Fate(0, 5, ending=Ending.REFUSED),
        Fate(0, 5, ending=Ending.TIMED_OUT),
        fate(ending=Ending.HUNG, token_count=2),
        fate(ending=Ending.ERROR),
        fate(ending=Ending.GIVEN_UP, token_count=0),
        fate(),
    ]
    fates[0].preemption_count = 3
    found = score(fates, LIMITS)
    assert found.goodput == 2 / 9 and found.count == 9
    assert (found.late_ttft, found.late_tpot) == (1, 1)
    assert (found.refused, found.timed_out, found.given_up) == (1, 1, 1)
    assert (found.hung, found.errors) == (1, 1)
    assert found.preemptions == 3
    assert found.ttft_ms_p50 == 1.0 and found.ttft_ms_p99 == 2.0


def test_there_is_no_share_of_nothing() -> None:
    with pytest.raises(ValueError, match="there is none"):
        score([], LIMITS)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.5) == 50 and percentile(values, 0.99) == 99
    assert percentile([4.0], 0.5) == 4 and percentile([], 0.5) == 0


def test_the_speed_is_found_between_two_by_its_logarithm() -> None:
    assert speed_at([(1, 1.0), (2, 0.95), (8, 0.85)], 0.9) == pytest.approx(4.0)
    assert speed_at([(1, 0.9), (2, 0.5)], 0.9) == 1.0


def test_the_first_speed_that_falls_short_counts_even_if_a_faster_one_does_not() -> None:
    found = speed_at([(1, 1.0), (2, 0.8), (4, 1.0)], 0.9)
    assert found is not None and 1 < found < 2


def test_a_curve_that_starts_below_has_no_speed_and_one_that_stays_above_its_fastest() -> None:
    assert speed_at([(1, 0.89), (2, 0.95)], 0.9) is None
    assert speed_at([], 0.9) is None
    assert speed_at([(1, 1.0), (2, 0.9)], 0.9) == 2
