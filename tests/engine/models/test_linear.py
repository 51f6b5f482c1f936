"""Linear layers and gated MLPs, packed and plain, against float32 arithmetic."""

import pytest
import torch
import torch.nn.functional as functional

from tidegate.engine.models.linear import GatedMlp, Linear, Place
from tidegate.engine.models.packed import Activation, can_pack

CPU = torch.device("cpu")
# A bfloat16 has 8 bits; sums of products are kept in float32.
RELATIVE_ERROR_MAX = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def random_matrix(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    error = (result.float() - expected).square().sum() / expected.square().sum()
    assert error.sqrt() <= RELATIVE_ERROR_MAX[result.dtype], error


def activated(values: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(values)
    return functional.gelu(values, approximate="tanh")


def test_only_bfloat16_on_the_cpu_is_packed() -> None:
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("rows", [0, 1, 5, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_puts_the_products_side_by_side(rows: int, dtype: torch.dtype) -> None:
    weights = [random_matrix(size, 48, dtype, size) for size in (32, 16, 24)]
    inputs = random_matrix(rows, 48, dtype, 1)
    with torch.inference_mode():
        result = Linear(weights, Place(CPU, dtype))(inputs)
    assert result.shape == (rows, 72)
    if rows:
        expected = torch.cat([inputs.float() @ weight.float().T for weight in weights], 1)
        assert_near(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_are_added_to_their_own_products(dtype: torch.dtype) -> None:
    weights = [random_matrix(size, 48, dtype, size) for size in (32, 16)]
    biases = [random_matrix(size, 1, dtype, size + 1).flatten() for size in (32, 16)]
    inputs = random_matrix(5, 48, dtype, 1)
    with torch.inference_mode():
        result = Linear(weights, Place(CPU, dtype), biases)(inputs)
    products = [
        inputs.float() @ weight.float().T + bias.float()
        for weight, bias in zip(weights, biases, strict=True)
    ]
    assert_near(result, torch.cat(products, 1))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_mlp_may_have_biases(dtype: torch.dtype, activation: Activation) -> None:
    gate, up = (random_matrix(96, 48, dtype, seed) / 7 for seed in (2, 3))
    down = random_matrix(48, 96, dtype, 4) / 10
    sizes = (96, 96, 48)
    biases = [random_matrix(size, 1, dtype, n).flatten() for n, size in enumerate(sizes)]
    inputs = random_matrix(5, 48, dtype, 1)
    with torch.inference_mode():
        result = GatedMlp(gate, up, down, activation, Place(CPU, dtype), biases)(inputs)
    gated = inputs.float() @ gate.float().T + biases[0].float()
    factor = inputs.float() @ up.float().T + biases[1].float()
    assert_near(
        result, (activated(gated, activation) * factor) @ down.float().T + biases[2].float()
    )


@pytest.mark.parametrize("rows", [0, 1, 5, 200])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_mlp_is_right(rows: int, activation: Activation, dtype: torch.dtype) -> None:
    gate, up = (random_matrix(96, 48, dtype, seed) / 7 for seed in (2, 3))
    down = random_matrix(48, 96, dtype, 4) / 10
    inputs = random_matrix(rows, 48, dtype, 1)
    with torch.inference_mode():
        result = GatedMlp(gate, up, down, activation, Place(CPU, dtype))(inputs)
    assert result.shape == (rows, 48)
    if rows:
        gated = inputs.float() @ gate.float().T
        factor = inputs.float() @ up.float().T
        assert_near(result, (activated(gated, activation) * factor) @ down.float().T)
