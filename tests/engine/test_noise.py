"""The hash is checked against Python's own integers, the noise against its distribution."""

import math

import torch

from tidegate.engine.noise import UNIFORM_BITS, gumbel, least_count, row_key, uniform_counts

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The published finaliser, in Python's unbounded integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def test_tensor_hash_equals_the_same_hash_in_unbounded_integers() -> None:
    ids = [0, 1, 7, 262_143, 2**31 - 1]
    for seed, index in [(0, 0), (1, 0), (0, 1), (2**64 - 1, 12345), (-5, 3)]:
        key = row_key(seed, index)
        counts = uniform_counts(torch.tensor([[key]]), torch.tensor([ids]))
        expected = [
            splitmix64((key + token * 0x9E3779B97F4A7C15) & MASK) >> (64 - UNIFORM_BITS)
            for token in ids
        ]
        assert torch.equal(counts[0], torch.tensor(expected))


def test_keys_differ_for_every_seed_and_output_index() -> None:
    keys = {row_key(seed, index) for seed in range(200) for index in range(200)}
    assert len(keys) == 40_000
    assert row_key(3, 4) == row_key(3 + 2**64, 4)


def test_noise_is_finite_at_both_ends_of_the_hash() -> None:
    ends = gumbel(torch.tensor([0, 1, 2**UNIFORM_BITS - 2, 2**UNIFORM_BITS - 1]))
    assert torch.isfinite(ends).all()
    assert ends.diff().min() > 0


def test_noise_has_the_mean_and_variance_of_a_gumbel_variable() -> None:
    noise = gumbel(uniform_counts(torch.tensor([[row_key(1, 0)]]), torch.arange(200_000)[None]))
    assert abs(noise.mean().item() - 0.57722) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03


def test_no_count_below_the_least_reaches_the_noise_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 2**UNIFORM_BITS, (50_000,), generator=generator)
    # The upper end is where doubles are coarsest.
    counts = torch.cat([counts, 2**UNIFORM_BITS - 1 - torch.arange(5000) ** 2])
    noise = gumbel(counts)
    assert (least_count(noise) <= counts).all()
    assert (least_count(noise + 0.01) > counts)[noise < 20].all()
