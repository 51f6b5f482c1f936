"""Rotary position embeddings, plain and scaled.

Weights whose outputs are rotated are put in `interleaved` order when a model is built: the two
numbers of a pair are then neighbours, and a rotation is one complex product. Keys lie in the
pool in that order; dot products do not depend on it.
"""

import math

import torch

from tidegate.engine.checkpoint.rope import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
)


class Rotary:
    """Rotations of query and key heads by their position, as complex numbers."""

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self._frequencies = frequencies(rope).to(device)
        self._magnitude = 1.0
        if isinstance(rope.scaling, YarnScaling):
            self._magnitude = rope.scaling.attention_factor

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """[positions, 1, size // 2], complex64, of YaRN's magnitude or 1."""
        angles = torch.outer(positions.float(), self._frequencies)
        magnitudes = torch.full_like(angles, self._magnitude)
        return torch.polar(magnitudes, angles).unsqueeze(1)


def frequencies(rope: Rope) -> torch.Tensor:
    """Radians by which each pair of a head turns at each position: [size // 2], float32."""
    exponents = torch.arange(0, rope.size, 2, dtype=torch.float32) / rope.size
    plain = 1.0 / rope.theta**exponents
    if rope.turning_pairs is not None:
        plain[rope.turning_pairs :] = 0.0
    match rope.scaling:
        case None:
            return plain
        case FactorScaling(factors=factors):
            return plain / torch.tensor(factors)
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling() as llama3:
            turns = llama3.original_context * plain / (2 * math.pi)
            span = llama3.high_turns - llama3.low_turns
            kept = ((turns - llama3.low_turns) / span).clamp_(0, 1)
            return plain * (kept + (1 - kept) / llama3.factor)
        case YarnScaling() as yarn:
            divided = _yarn_divided(yarn, rope)
            return plain * (1 - divided) + plain / yarn.factor * divided


def _yarn_divided(yarn: YarnScaling, rope: Rope) -> torch.Tensor:
    """How much each pair is divided by the factor, from 0 to 1: section 3.2 of the paper."""

    def pair_of(turns: float) -> float:
        """The pair that turns so often in the original context, as a fraction."""
        positions_a_radian = yarn.original_context / (turns * 2 * math.pi)
        return rope.size * math.log(positions_a_radian) / (2 * math.log(rope.theta))

    low, high = pair_of(yarn.fast_turns), pair_of(yarn.slow_turns)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    # A range of no width would be a division by zero.
    width = high - low if high != low else 0.001
    return ((torch.arange(rope.size // 2, dtype=torch.float32) - low) / width).clamp_(0, 1)


def interleaved(
    weight: torch.Tensor, head_size: int, rotated: int | None = None
) -> torch.Tensor:
    """`weight` [heads * head_size, …] with the two rows of each pair next to each other.

    The first `rotated` rows of each head pair up by halves (None: all); the rest stay.
    """
    size = head_size if rotated is None else rotated
    heads = weight.view(-1, head_size, *weight.shape[1:])
    pairs = heads[:, :size].view(-1, 2, size // 2, *weight.shape[1:]).transpose(1, 2)
    return torch.cat([pairs.flatten(1, 2), heads[:, size:]], 1).view(weight.shape)


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> None:
    """Turn the first numbers of `heads` [tokens, heads, size], float32 in interleaved order, in
    place: twice as many as there are in a row of `rotation`.
    """
    count = rotation.shape[-1]
    pairs = heads[..., : 2 * count].view(*heads.shape[:2], count, 2)
    torch.view_as_complex(pairs).mul_(rotation)
