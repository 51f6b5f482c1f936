"""Routed experts against one token and one expert at a time."""

import pytest
import torch
import torch.nn.functional as functional

from tidegate.engine.models.experts import Experts
from tidegate.engine.models.linear import Place

CPU = torch.device("cpu")
EXPERTS, HIDDEN, INNER = 6, 16, 8
# A bfloat16 has 8 bits; sums of products are kept in float32.
RELATIVE_ERROR_MAX = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    first, second = gate_up.chunk(2, 1)
    return functional.silu(first) * second


class Sample:
    def __init__(self, dtype: torch.dtype, has_bias: bool) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.gate_up = [self.random(2 * INNER, HIDDEN, dtype=dtype) for _ in range(EXPERTS)]
        self.down = [self.random(HIDDEN, INNER, dtype=dtype) for _ in range(EXPERTS)]
        scale = 1.0 if has_bias else 0.0
        self.gate_up_bias = [
            scale * self.random(2 * INNER, dtype=dtype) for _ in range(EXPERTS)
        ]
        self.down_bias = [scale * self.random(HIDDEN, dtype=dtype) for _ in range(EXPERTS)]
        self.experts = Experts(
            self.gate_up,
            self.down,
            gate,
            Place(CPU, dtype),
            gate_up_bias=self.gate_up_bias if has_bias else None,
            down_bias=self.down_bias if has_bias else None,
        )

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def expected(
        self, inputs: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros(inputs.shape[0], HIDDEN)
        for token, experts in enumerate(chosen.numpy()):
            for place, expert in enumerate(int(number) for number in experts):
                wide = self.gate_up[expert].float() @ inputs[token].float()
                inner = gate((wide + self.gate_up_bias[expert].float()).unsqueeze(0))[0]
                result = self.down[expert].float() @ inner + self.down_bias[expert].float()
                out[token] += weights[token, place] * result
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("token_count", [0, 1, 3, 50])
def test_each_token_gets_the_weighted_sum_of_its_experts(
    token_count: int, has_bias: bool, dtype: torch.dtype
) -> None:
    sample = Sample(dtype, has_bias)
    inputs = sample.random(token_count, HIDDEN, dtype=dtype)
    # Expert 5 gets no token.
    scores = sample.random(token_count, EXPERTS - 1)
    weights, chosen = scores.topk(3, 1)
    with torch.inference_mode():
        result = sample.experts(inputs, chosen, weights)
    assert result.shape == (token_count, HIDDEN) and result.dtype is torch.float32
    if token_count:
        expected = sample.expected(inputs, chosen, weights)
        error = (result - expected).square().sum() / expected.square().sum()
        assert error.sqrt() <= RELATIVE_ERROR_MAX[dtype], error


def test_a_tokens_result_does_not_depend_on_its_companions() -> None:
    sample = Sample(torch.float32, has_bias=True)
    inputs, scores = sample.random(40, HIDDEN), sample.random(40, EXPERTS)
    weights, chosen = scores.topk(2, 1)
    together = sample.experts(inputs, chosen, weights)
    for token in range(40):
        part = slice(token, token + 1)
        alone = sample.experts(inputs[part], chosen[part], weights[part])
        torch.testing.assert_close(alone, together[part], rtol=1e-4, atol=1e-4)
