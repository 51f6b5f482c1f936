"""Rotations: frequencies as transformers computes them, and which numbers turn."""

from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tidegate.engine.checkpoint.hf_fields import HfRope, rope_from_hf
from tidegate.engine.checkpoint.rope import Rope
from tidegate.engine.models.rotary import Rotary, frequencies, interleaved, rotate

CPU = torch.device("cpu")
CONTEXT = 8192
HEAD_SIZE = 64

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
SCALED: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 8.0},
    LLAMA3 | {"original_max_position_embeddings": 8192},
    LLAMA3 | {"original_max_position_embeddings": 100},
    LLAMA3,
    YARN,
    YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.25},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.4},
    YARN | {"original_max_position_embeddings": 16},
    YARN | {"factor": 0.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "partial_rotary_factor": 0.4, "factor": 2.0},
    {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
]


@pytest.mark.parametrize("theta", [1e4, 150_000.0])
@pytest.mark.parametrize("fields", SCALED, ids=str)
def test_frequencies_and_magnitude_are_those_of_transformers(
    fields: dict[str, Any], theta: float
) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": theta, **fields},
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, CPU)
    source = msgspec.convert(fields | {"rope_theta": theta}, HfRope)
    rope = rope_from_hf("rope_parameters", source, HEAD_SIZE, CONTEXT, theta=1.0)
    torch.testing.assert_close(frequencies(rope), expected, rtol=2e-6, atol=0)
    rotations = Rotary(rope, CPU)(torch.arange(50))
    assert rotations.shape == (50, 1, expected.shape[0])
    torch.testing.assert_close(rotations.abs(), torch.full_like(rotations.abs(), magnitude))


def test_a_rotation_turns_halves_against_each_other_and_leaves_the_rest() -> None:
    head_size, size, positions = 12, 8, torch.tensor([0, 1, 7])
    rope = Rope(theta=100.0, size=size)
    heads = torch.randn(3, 2, head_size)
    rows = torch.arange(2 * head_size).float()
    order = interleaved(rows, head_size, size).view(2, head_size)[0].long()
    # The two numbers of a pair come next to each other; what is not rotated stays.
    assert torch.equal(order, torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10, 11]))
    turned = heads[..., order].contiguous()
    rotate(turned, Rotary(rope, CPU)(positions))
    angles = torch.outer(positions.float(), 100.0 ** (-torch.arange(0, size, 2) / size))
    cosines, sines = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second = heads[..., :4], heads[..., 4:8]
    expected = torch.cat(
        [
            first * cosines - second * sines,
            second * cosines + first * sines,
            heads[..., size:],
        ],
        -1,
    )
    torch.testing.assert_close(turned, expected[..., order])


def test_matrices_and_biases_are_interleaved_alike_and_wholly_unless_told() -> None:
    weight = torch.randn(24, 5)
    by_columns = torch.stack([interleaved(column, 12) for column in weight.T], 1)
    assert torch.equal(interleaved(weight, 12), by_columns)
    assert torch.equal(interleaved(torch.arange(6), 6), torch.tensor([0, 3, 1, 4, 2, 5]))
