"""Linear layers and gated MLPs, from packed weights where the machine gains by it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from tidegate.engine.models.packed import (
    Activation,
    can_pack,
    pack,
    packed_linear,
    packed_product,
)

Biases = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model's weights are, and their type."""

    device: torch.device
    dtype: torch.dtype

    def put(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.device, self.dtype)


class Linear:
    """The product with one or several weights [outputs, inputs] of the same input, fused: the
    result has their outputs side by side. Biases [outputs] are added if there are any, one for
    each weight.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        place: Place,
        biases: Biases = (),
    ) -> None:
        weight = place.put(weights[0] if len(weights) == 1 else torch.cat(list(weights)))
        self._bias = place.put(torch.cat(list(biases))) if biases else None
        self._is_packed = can_pack(place.device, place.dtype)
        self._weight = pack(weight) if self._is_packed else weight

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._is_packed:
            return packed_linear(inputs, self._weight, self._bias)
        return functional.linear(inputs, self._weight, self._bias)


class PlainGate:
    """activation(gate(inputs)) * up(inputs), the two products fused into one. `biases` are
    gate's and up's, or none.
    """

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        activation: Activation,
        place: Place,
        biases: Biases = (),
    ) -> None:
        self._gate_up = Linear([gate, up], place, biases)
        self._activation = _ACTIVATIONS[activation]

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(inputs).chunk(2, dim=1)
        return self._activation(gate).mul_(up)


class PackedGate:
    """The same from packed weights, with the activation and the factor in the products."""

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        activation: Activation,
        place: Place,
        biases: Biases = (),
    ) -> None:
        self._gate, self._up = pack(place.put(gate)), pack(place.put(up))
        self._gate_bias = place.put(biases[0]) if biases else None
        self._up_bias = place.put(biases[1]) if biases else None
        self._activation: Activation = activation

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        gated = packed_linear(inputs, self._gate, self._gate_bias, self._activation)
        return packed_product(inputs, self._up, gated, self._up_bias)


class GatedMlp:
    """down(activation(gate(inputs)) * up(inputs)); weights are [outputs, inputs]. `biases` are
    gate's, up's and down's, or none.
    """

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        activation: Activation,
        place: Place,
        biases: Biases = (),
    ) -> None:
        kind = PackedGate if can_pack(place.device, place.dtype) else PlainGate
        self._gate: PackedGate | PlainGate = kind(gate, up, activation, place, biases[:2])
        self._down = Linear([down], place, biases[2:])

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._down(self._gate(inputs))


def _gelu_tanh(values: torch.Tensor) -> torch.Tensor:
    return functional.gelu(values, approximate="tanh")


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": _gelu_tanh,
}
