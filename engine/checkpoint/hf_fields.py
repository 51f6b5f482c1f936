"""Fields of config.json that several families share, and checks with the file's own names."""

import json
import math
from typing import Any

import msgspec

from tidegate.engine.checkpoint.config import COUNT_MAX, LAYER_COUNT_MAX
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    Scaling,
    YarnScaling,
)

FULL = "full_attention"
WINDOW = "sliding_attention"
FP8_BLOCK = 128  # Rows, and columns, that share a scale.


class HfRope(msgspec.Struct):
    """A rotary embedding, in `rope_parameters` or in the older `rope_scaling`."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None  # The older name of `rope_type`.
    partial_rotary_factor: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class HfFields(msgspec.Struct, kw_only=True):
    """What all families' files hold. Fields with a default may be absent."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise `CheckpointError` for counts that what follows could not even compute with."""
        within("num_attention_heads", self.num_attention_heads, COUNT_MAX)
        within("num_hidden_layers", self.num_hidden_layers, LAYER_COUNT_MAX)


def layers_of_types(layer_types: list[str]) -> tuple[bool, ...]:
    """For each layer whether it has a window. Raises `CheckpointError` for other types."""
    for layer_type in layer_types:
        if layer_type not in (FULL, WINDOW):
            raise CheckpointError(
                f"layer_types has {layer_type}: supported are {FULL} and {WINDOW}"
            )
    return tuple(layer_type == WINDOW for layer_type in layer_types)


def rope_from_hf(
    field: str, source: HfRope | None, head_size: int, context: int, *, theta: float
) -> Rope:
    """The rotation that `field` of the file describes; `theta` is the base if it names none.

    `head_size` is what a partial rotation is a share of, and `context` the model's positions.
    Raises `CheckpointError` for a kind that is not supported, and for missing numbers.
    """
    rope = source or HfRope()
    kind = rope.rope_type or rope.type or "default"
    share = 1.0 if rope.partial_rotary_factor is None else rope.partial_rotary_factor
    if not 0 < share <= 1:
        raise CheckpointError(
            f"{field}.partial_rotary_factor is {share}: must be above 0, and 1 at most"
        )
    size, turning_pairs = int(head_size * share), None
    if kind == "proportional":
        size, turning_pairs = head_size, int(share * head_size // 2)
    return Rope(
        theta=theta if rope.rope_theta is None else rope.rope_theta,
        size=size,
        turning_pairs=turning_pairs,
        scaling=_scaling(field, kind, rope, context),
    )


def _scaling(field: str, kind: str, rope: HfRope, context: int) -> Scaling | None:
    def needed(name: str) -> float:
        value: float | None = getattr(rope, name)
        if value is None:
            raise CheckpointError(f"{field}.{name} is missing: the type {kind} needs it")
        return value

    trained = rope.original_max_position_embeddings or context
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(needed("factor"))
        case "proportional":
            return None if rope.factor is None else LinearScaling(rope.factor)
        case "llama3":
            return Llama3Scaling(
                factor=needed("factor"),
                low_turns=needed("low_freq_factor"),
                high_turns=needed("high_freq_factor"),
                original_context=trained,
            )
        case "yarn":
            factor = context / trained if rope.factor is None else rope.factor
            return YarnScaling(
                factor=factor,
                original_context=trained,
                fast_turns=rope.beta_fast or 32.0,
                slow_turns=rope.beta_slow or 1.0,
                attention_factor=_yarn_attention_factor(rope, factor),
                truncate=rope.truncate,
            )
        case _:
            raise CheckpointError(
                f"{field} has the type {kind}: supported are default, linear, llama3, "
                "proportional and yarn"
            )


def _yarn_attention_factor(rope: HfRope, factor: float) -> float:
    """The paper's 0.1 ln(factor) + 1 unless the file says otherwise."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def only(field: str, value: object, supported: object) -> None:
    """Raise `CheckpointError` unless the field has the one supported value."""
    if value != supported:
        shown = json.dumps(value)
        raise CheckpointError(f"{field} is {shown}: only {json.dumps(supported)} is supported")


def fp8_or_none(quantization: dict[str, Any] | None) -> None:
    """Raise `CheckpointError` unless weights are plain, or FP8 with a scale for each block."""
    if quantization is not None:
        only("quantization_config.quant_method", quantization.get("quant_method"), "fp8")
        size = quantization.get("weight_block_size")
        only("quantization_config.weight_block_size", size, [FP8_BLOCK, FP8_BLOCK])


def within(field: str, value: int, count_max: int) -> None:
    if not 1 <= value <= count_max:
        raise CheckpointError(f"{field} is {value}: must be from 1 to {count_max}")


def power(field: str, value: float, exponent: float) -> float:
    """`value ** exponent`; raises `CheckpointError` unless the value is positive."""
    if value <= 0:
        raise CheckpointError(f"{field} is {value}: must be a positive number")
    return float(value**exponent)


def ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id or several, each once, in order."""
    if value is None:
        return ()
    return tuple(dict.fromkeys(value)) if isinstance(value, list) else (value,)
