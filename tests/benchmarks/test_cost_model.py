"""The cost model: what counts in a launch, and how constants are found from measured times."""

import pytest

from cost_model import Costs, chunk_work, decode_work, fit, read_costs

COSTS = Costs(100.0, 5.0, 0.25, 50.0, 20.0, 0.5, 10.0)


def test_a_chunk_costs_its_tokens_and_the_pairs_that_it_reads() -> None:
    # 4 tokens after 10 positions read 4 * (10 + 2) pairs.
    assert COSTS.us(chunk_work(10, 14, samples=False)) == 100 + 4 * 5 + 48 * 0.25
    sampled = COSTS.us(chunk_work(10, 14, samples=True))
    assert sampled == 100 + 4 * 5 + 48 * 0.25 + 50 + 20


def test_chunks_cost_as_much_as_one_but_for_the_launches() -> None:
    whole = COSTS.us(chunk_work(0, 1000, samples=False))
    parts = sum(COSTS.us(chunk_work(n, n + 100, samples=False)) for n in range(0, 1000, 100))
    assert parts == pytest.approx(whole + 9 * COSTS.launch_us)


def test_rows_that_decode_share_the_launch_and_the_head() -> None:
    assert COSTS.us(decode_work(8, 800)) == 100 + 50 + 8 * 20 + 800 * 0.5


def test_a_factor_scales_launches_and_copies_alike() -> None:
    work = chunk_work(0, 64, samples=True) + decode_work(3, 50)
    fast = COSTS.scaled(0.01)
    assert fast.us(work) == pytest.approx(COSTS.us(work) / 100)
    assert fast.copy_us(5000) == pytest.approx(COSTS.copy_us(5000) / 100) == 5.0


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    works = [
        chunk_work(start, start + count, samples=samples)
        for start in (0, 500, 4000)
        for count in (16, 64, 256)
        for samples in (False, True)
    ]
    works += [decode_work(rows, rows * n) for rows in (1, 8, 32) for n in (100, 3000)]
    found, error = fit(works, [COSTS.us(work) for work in works], COSTS.copy_bytes_per_us)
    assert error < 1e-6
    for work in works:
        assert found.us(work) == pytest.approx(COSTS.us(work))


def test_no_constant_is_negative() -> None:
    works = [decode_work(rows, 0) for rows in (1, 2, 3, 4)]
    # Fewer microseconds the more rows: the best line would have a negative slope.
    found, error = fit(works, [130.0, 120.0, 110.0, 100.0], 1.0)
    assert found.row_us == 0 and found.launch_us >= 0 and error > 0.05


def test_the_costs_that_come_with_the_benchmark_are_those_of_a_real_worker() -> None:
    measured = read_costs()
    assert measured.model == "gemma3-270m" and measured.error_mean < 0.1
    prompt_s = measured.costs.us(chunk_work(0, 512, samples=True)) / 1e6
    assert 0.1 < prompt_s < 2
