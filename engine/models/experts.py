"""Routed experts: MLPs of which each token goes through a few.

1. A family's router gives each token its experts and their weights.
2. The tokens are sorted by expert, so that each expert computes all of its own at once.
3. Each result is multiplied with its weight, and a token's results are added up, in the order
   of the experts' numbers: so a token's sum does not depend on the other tokens.
"""

from collections.abc import Callable, Iterable

import torch

from tidegate.engine.models.linear import Linear, Place

# From [rows, 2 * inner], gate and up as a family's weights have them, to [rows, inner].
Gate = Callable[[torch.Tensor], torch.Tensor]


class Experts:
    """`gate_up` gives for each expert a weight [2 * inner, hidden], `down` one of [hidden,
    inner]. Biases, if there are any, are [2 * inner] and [hidden] for each. One expert's are
    taken at a time, so they may be made as they are asked for.
    """

    def __init__(
        self,
        gate_up: Iterable[torch.Tensor],
        down: Iterable[torch.Tensor],
        gate: Gate,
        place: Place,
        *,
        gate_up_bias: Iterable[torch.Tensor] | None = None,
        down_bias: Iterable[torch.Tensor] | None = None,
    ) -> None:
        self._gate_up = _linears(gate_up, gate_up_bias, place)
        self._down = _linears(down, down_bias, place)
        self._gate = gate

    def __call__(
        self, inputs: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts: [tokens, hidden], float32.

        `inputs` [tokens, hidden] have the weights' type; `chosen` [tokens, k], int64, and
        `weights` [tokens, k], float32, are the router's.
        """
        token_count, per_token = chosen.shape
        order = torch.argsort(chosen.flatten(), stable=True)
        tokens = order // per_token
        factors = weights.flatten().index_select(0, order).unsqueeze(1)
        # One look at the device for all experts.
        counts = torch.bincount(chosen.flatten(), minlength=len(self._down)).cpu().numpy()
        out = torch.zeros(token_count, inputs.shape[1], device=inputs.device)
        first = 0
        for expert, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            part = slice(first, first + count)
            rows = inputs.index_select(0, tokens[part])
            result = self._down[expert](self._gate(self._gate_up[expert](rows)))
            out.index_add_(0, tokens[part], result.float().mul_(factors[part]))
            first += count
        return out


def _linears(
    weights: Iterable[torch.Tensor], biases: Iterable[torch.Tensor] | None, place: Place
) -> list[Linear]:
    if biases is None:
        return [Linear([weight], place) for weight in weights]
    return [
        Linear([weight], place, [bias]) for weight, bias in zip(weights, biases, strict=True)
    ]
