"""Products with weights in the block order of a CPU's matrix kernels.

oneDNN computes bfloat16 products of few rows about twice as fast from weights that were put
into its own order once, and applies an activation or a product before the result leaves
float32. These are the operators that torch's own compiler calls for inference on CPUs.
"""

from typing import Any, Literal

import torch

Activation = Literal["silu", "gelu_tanh"]

_OPERATORS: Any = torch.ops.mkldnn
_NAMES = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
# The row count that the order is chosen for; it serves other counts as well.
_ROWS_HINT = 32
# oneDNN's name of an activation, and of its variant.
_ATTRIBUTES: dict[Activation | None, tuple[str, str]] = {
    None: ("none", ""),
    "silu": ("swish", ""),
    "gelu_tanh": ("gelu", "tanh"),
}


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of this type on this device can be packed, on this machine."""
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and all(hasattr(_OPERATORS, name) for name in _NAMES)
        and bool(_OPERATORS._is_mkldnn_bf16_supported())
    )


def pack(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [outputs, inputs] in packed order: an opaque copy for the functions below."""
    with torch.inference_mode():
        packed: torch.Tensor = _OPERATORS._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def packed_linear(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """activation(inputs @ weight.T + bias)."""
    name, variant = _ATTRIBUTES[activation]
    result: torch.Tensor = _OPERATORS._linear_pointwise(inputs, packed, bias, name, [], variant)
    return result


def packed_product(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(inputs @ weight.T + bias) * factor."""
    result: torch.Tensor = _OPERATORS._linear_pointwise.binary(
        inputs, factor, packed, bias, "mul"
    )
    return result
