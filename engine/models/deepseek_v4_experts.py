"""DeepSeek V4's experts: chosen by score or looked up by token, and one that all go through."""

from collections.abc import Callable

import torch
import torch.nn.functional as functional

from tidegate.engine.checkpoint.families.deepseek_v4 import (
    EXPERT_TABLE,
    RoutedExperts,
    Scoring,
)
from tidegate.engine.models.experts import Experts
from tidegate.engine.models.linear import Linear, Place

Take = Callable[[str], torch.Tensor]  # A layer's weight, by its name there.


class RoutedMlp:
    """The experts of a layer. `has_table` says that a token's experts are looked up."""

    def __init__(self, sizes: RoutedExperts, has_table: bool, take: Take, place: Place) -> None:
        self._sizes = sizes
        device = place.device
        self._router = take("ffn.gate.weight").to(device)
        # By token, or added to the scores by which the experts are chosen.
        self._has_table = has_table
        name = f"ffn{EXPERT_TABLE}" if has_table else "ffn.gate.bias"
        self._choice = take(name).to(device)

        def gate_up(expert: str) -> torch.Tensor:
            return torch.cat([take(f"ffn.{expert}.w1.weight"), take(f"ffn.{expert}.w3.weight")])

        names = [f"experts.{number}" for number in range(sizes.count)]
        self._gate = _ClampedGate(sizes.limit)
        self._experts = Experts(
            map(gate_up, names),
            (take(f"ffn.{name}.w2.weight") for name in names),
            self._gate,
            place,
        )
        self._shared_gate_up = Linear([gate_up("shared_experts")], place)
        self._shared_down = Linear([take("ffn.shared_experts.w2.weight")], place)
        self._dtype = place.dtype

    def __call__(self, inputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], float32, from `inputs` of that kind and the token ids [tokens].

        The router stays in float32, where scores that round to one bfloat16 number still have
        an order.
        """
        scores = score(functional.linear(inputs, self._router), self._sizes.scoring)
        if self._has_table:
            chosen = self._choice.index_select(0, tokens)
        else:
            chosen = (scores + self._choice).topk(self._sizes.per_token, 1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * self._sizes.factor
        typed = inputs.to(self._dtype)
        shared = self._shared_down(self._gate(self._shared_gate_up(typed)))
        return self._experts(typed, chosen, weights).add_(shared)


def score(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """What the router's `logits` [tokens, experts], float32, are as weights."""
    match scoring:
        case "sqrtsoftplus":
            return functional.softplus(logits).sqrt_()
        case "sigmoid":
            return torch.sigmoid(logits)
        case "softmax":
            return torch.softmax(logits, 1)


class _ClampedGate:
    """What `RoutedExperts` says of an expert's inner numbers."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, 1)
        gate = gate.clamp(max=self._limit)
        return functional.silu(gate).mul_(up.clamp(-self._limit, self._limit))
