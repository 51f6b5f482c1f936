"""Counter-based noise: the same (seed, output index, token) gives the same number anywhere.

An integer hash (the finaliser of SplitMix64) works on int64 tensors, whose products wrap
alike on every device. So a row's noise depends on no generator state, no other row and no
batch shape. Only the two logarithms of `gumbel` are floating point; they are taken in
float64, where devices differ by at most an ulp.
"""

import torch

UNIFORM_BITS = 52  # (m + 0.5) / 2**52 is exact in float64 and never 0 or 1.

_GAMMA = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def row_key(seed: int, output_index: int) -> int:
    """The key of one token to sample, a signed 64-bit integer; `seed` counts mod 2**64."""
    return _signed(_mix(_mix((seed + _GAMMA) & _MASK) + output_index * _GAMMA))


def uniform_counts(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Integers in [0, 2**UNIFORM_BITS), int64, of the shape that both arguments broadcast to.

    `keys` are `row_key`s and `token_ids` vocabulary ids, both int64.
    """
    mixed = token_ids * _signed(_GAMMA) + keys
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_FACTOR_1)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_FACTOR_2)
    return _shifted(mixed ^ _shifted(mixed, 31), 64 - UNIFORM_BITS)


def gumbel(counts: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise in float64 from `uniform_counts`; increasing in the count."""
    uniform = (counts.double() + 0.5) * 2.0**-UNIFORM_BITS
    return -torch.log(-torch.log(uniform))


def least_count(noise: torch.Tensor) -> torch.Tensor:
    """A count below which no count's Gumbel noise reaches `noise` (float64 in, int64 out)."""
    uniform = torch.exp(-torch.exp(-noise))
    # Rounding moves the product by a few counts at most; the slack is far above that.
    return (uniform * 2.0**UNIFORM_BITS).long() - 64


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FACTOR_1) & _MASK
    value = ((value ^ (value >> 27)) * _FACTOR_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right: int64 shifts copy the sign, which the mask removes."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
