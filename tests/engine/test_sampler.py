"""The sampler beside a plain one that ranks the whole vocabulary, and its statistics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidegate.engine.noise import gumbel, row_key, uniform_counts
from tidegate.engine.sampler import Draw, finite_rows, largest, sample, sample_finite
from tidegate.ipc.protocol import Sampling

# Filters of every kind, and values at the ends of their ranges.
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.3, seed=2),
    Sampling(temperature=2.5, seed=3),
    Sampling(temperature=1.0, top_k=1, seed=4),
    Sampling(temperature=1.0, top_k=40, seed=5),
    Sampling(temperature=0.8, top_k=700, seed=6),
    Sampling(temperature=1.0, top_k=10**9, seed=7),
    Sampling(temperature=1.0, top_p=0.0, seed=8),
    Sampling(temperature=1.0, top_p=1e-9, seed=9),
    Sampling(temperature=0.7, top_p=0.5, seed=10),
    Sampling(temperature=1.0, top_p=0.9, seed=11),
    Sampling(temperature=3.0, top_p=0.999, seed=12),
    Sampling(temperature=1.0, min_p=0.1, seed=13),
    Sampling(temperature=4.0, min_p=0.001, seed=14),
    Sampling(temperature=1.0, min_p=1.0, seed=15),
    Sampling(temperature=1.2, top_k=50, top_p=0.8, min_p=0.02, seed=16),
    Sampling(temperature=1.0, top_k=300, top_p=0.95, seed=2**64 - 1),
]


def logits_of(rows: int, vocabulary: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Random logits, rounded to bfloat16 so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator) * spread).bfloat16().float()


def kept_ids(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    """The ids that the filters keep, by a walk down the whole ranked vocabulary."""
    values = logits.double().numpy()
    order = np.lexsort((np.arange(len(values)), -values))
    scaled = (values[order] - values.max()) / sampling.temperature
    weights = np.exp(scaled)
    if sampling.top_k > 0:
        order, scaled, weights = (part[: sampling.top_k] for part in (order, scaled, weights))
    kept: list[int] = []
    mass = 0.0
    for token, gap, weight in zip(order, scaled, weights, strict=True):
        enough = sampling.top_p < 1 and mass >= sampling.top_p * weights.sum()
        if kept and (enough or (sampling.min_p > 0 and gap < math.log(sampling.min_p))):
            break
        kept.append(int(token))
        mass += weight
    return kept


def plain_sample(logits: torch.Tensor, draw: Draw) -> int:
    if draw.sampling.temperature == 0:
        return int(logits.argmax())
    ids = torch.tensor(kept_ids(logits, draw.sampling))
    key = torch.tensor([row_key(draw.sampling.seed, draw.output_index)])
    scores = logits[ids].double() / draw.sampling.temperature + gumbel(uniform_counts(key, ids))
    return int(ids[scores.argmax()])


@pytest.mark.parametrize("vocabulary", [3, 300, 6000])
def test_every_mix_of_filters_equals_the_plain_sampler(vocabulary: int) -> None:
    for seed in range(3):
        draws = [Draw(sampling, seed * 10) for sampling in SAMPLINGS]
        logits = logits_of(len(draws), vocabulary, seed)
        expected = [plain_sample(row, draw) for row, draw in zip(logits, draws, strict=True)]
        assert sample(logits, draws) == expected


def test_a_row_gives_the_same_token_whoever_is_in_the_batch() -> None:
    draws = [Draw(sampling, index) for index, sampling in enumerate(SAMPLINGS * 3)]
    logits = logits_of(len(draws), 5000, seed=7)
    together = sample(logits, draws)
    order = [int(i) for i in np.random.default_rng(0).permutation(len(draws))]
    shuffled = sample(logits[order], [draws[i] for i in order])
    assert shuffled == [together[i] for i in order]
    alone = [sample(logits[i : i + 1], [draws[i]])[0] for i in range(len(draws))]
    assert alone == together


def test_equal_logits_everywhere_are_settled_by_token_id() -> None:
    flat = torch.zeros(3, 4000)
    draws = [
        Draw(Sampling(temperature=1.0, top_k=300, seed=1), 0),
        Draw(Sampling(temperature=1.0, top_p=0.5, seed=2), 0),
        Draw(Sampling(), 0),
    ]
    assert kept_ids(flat[0], draws[0].sampling) == list(range(300))
    assert sample(flat, draws) == [plain_sample(flat[0], draw) for draw in draws]


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 5e-324, -1.0, math.nan])
def test_a_tiny_or_senseless_temperature_is_greedy(temperature: float) -> None:
    logits = logits_of(4, 1000, seed=1) * 1e4
    draws = [
        Draw(Sampling(temperature, top_k=k, top_p=p, seed=5), 3)
        for k, p in [(0, 1.0), (7, 1.0), (0, 0.3), (9, 0.4)]
    ]
    assert torch.equal(torch.tensor(sample(logits, draws)), logits.argmax(dim=1))


@pytest.mark.parametrize(
    "only_best",
    [
        Sampling(1.5, top_p=0.0),
        Sampling(1.5, top_p=1e-9),
        Sampling(1.5, top_k=1),
        Sampling(1.5, min_p=1.5),
    ],
)
def test_filters_that_leave_one_token_leave_the_best(only_best: Sampling) -> None:
    logits = logits_of(64, 900, seed=2)
    draws = [Draw(only_best, index) for index in range(64)]
    assert torch.equal(torch.tensor(sample(logits, draws)), logits.argmax(dim=1))


def test_huge_logits_and_temperatures_stay_within_the_vocabulary() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 2.9e38]]).repeat(4, 1)
    draws = [
        Draw(Sampling(temperature, top_p=top_p, seed=index), index)
        for index, (temperature, top_p) in enumerate(
            [(2e-5, 1.0), (2e-5, 0.9), (math.inf, 1.0), (math.inf, 0.9)]
        )
    ]
    tokens = sample(logits, draws)
    assert tokens[:2] == [0, 0]
    assert all(0 <= token < 4 for token in tokens)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6),
        Sampling(temperature=1.0, top_k=6),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    ],
)
@pytest.mark.parametrize("over", ["output_index", "seed"])
def test_frequencies_pass_a_chi_square_test(sampling: Sampling, over: str) -> None:
    draw_count = 10_000
    logits = logits_of(1, 20, seed=3, spread=1.5)
    ids = kept_ids(logits[0], sampling)
    weights = np.exp(logits[0, ids].double().numpy() / sampling.temperature)
    expected = draw_count * weights / weights.sum()
    if over == "seed":
        draws = [
            Draw(
                Sampling(
                    sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, s
                ),
                0,
            )
            for s in range(draw_count)
        ]
    else:
        draws = [Draw(sampling, index) for index in range(draw_count)]
    tokens = sample(logits.expand(draw_count, -1), draws)
    counts = np.bincount(tokens, minlength=20)
    assert counts.sum() == counts[ids].sum() == draw_count
    statistic = float((((counts[ids] - expected) ** 2) / expected).sum())
    # Mean and variance of the statistic are n and 2n for n degrees of freedom.
    degrees = len(ids) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def test_rows_with_one_seed_do_not_follow_one_another() -> None:
    logits = torch.zeros(2000, 8)
    draws = [Draw(Sampling(1.0, seed=4), index) for index in range(2000)]
    tokens = np.array(sample(logits, draws))
    pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    expected = 1999 / 64
    assert float(((pairs - expected) ** 2 / expected).sum()) < 63 + 4 * math.sqrt(126)


def test_rows_with_a_value_that_is_not_finite_are_told() -> None:
    logits = torch.zeros(5, 100)
    logits[1, 17] = math.nan
    logits[2, 99] = math.inf
    logits[4, 0] = -math.inf
    assert finite_rows(logits) == [True, False, False, True, False]
    tokens = sample_finite(logits, [Draw(Sampling(), 0)] * 5)
    assert tokens == [0, None, None, 0, None]
    assert sample_finite(logits[1:3], [Draw(Sampling(), 0)] * 2) == [None, None]


def test_a_row_whose_sum_is_too_large_for_float32_is_finite_all_the_same() -> None:
    logits = torch.full((2, 3000), 3e38)
    logits[1, 2000] = math.inf
    assert finite_rows(logits) == [True, False]
    assert sample_finite(logits, [Draw(Sampling(), 0)] * 2) == [0, None]


@given(
    vocabulary=st.sampled_from([1, 7, 511, 512, 513, 1024, 5000]),
    seed=st.integers(0, 2**32 - 1),
    values=st.integers(1, 9),
)
def test_the_largest_logit_is_found_and_the_least_id_among_equals(
    vocabulary: int, seed: int, values: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-values, values, (3, vocabulary), endpoint=True).astype(np.float32)
    rows = torch.tensor(logits)
    wide = torch.cat([rows, rows], dim=1)
    expected = torch.tensor(logits.argmax(axis=1))
    assert torch.equal(largest(rows), expected)
    assert torch.equal(largest(wide[:, vocabulary:]), expected)  # Not in one piece.


@pytest.mark.cuda
def test_a_gpu_samples_what_the_cpu_samples() -> None:
    draws = [Draw(sampling, index) for index, sampling in enumerate(SAMPLINGS * 4)]
    logits = logits_of(len(draws), 20_000, seed=9)
    assert sample(logits.cuda(), draws) == sample(logits, draws)
