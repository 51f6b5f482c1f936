"""Reads the fields of a Gemma 4 model in a GGUF file: dense ones, of any size."""

from typing import Any

from tidegate.engine.checkpoint.config import AttentionShape
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gemma4 import Gemma4Config, PerLayerInputs
from tidegate.engine.checkpoint.gguf_factors import ROPE_FACTORS, rope_factors
from tidegate.engine.checkpoint.gguf_fields import ArchitectureFields
from tidegate.engine.checkpoint.rope import Rope

ROPE_THETA_WINDOW = 10_000.0  # Of files that do not say.
# A pair whose frequency is divided by so much does not turn.
STILL_FACTOR_MIN = 1e29
TOKEN_INPUTS = "per_layer_token_embd.weight"


def gemma4_from_gguf(fields: ArchitectureFields, common: dict[str, Any]) -> Gemma4Config:
    """`common` are the fields that all families read alike."""
    layer_count: int = common["layer_count"]
    layer_is_window = tuple(fields.booleans("attention.sliding_window_pattern"))
    full_size = fields.count("attention.key_length")
    window_size = fields.count("attention.key_length_swa", full_size)
    _refuse_what_is_not_supported(fields, full_size, window_size)
    head_count = fields.count("attention.head_count")
    kv_head_counts = fields.counts("attention.head_count_kv", layer_count)
    if len(layer_is_window) != layer_count:
        raise fields.error(
            "attention.sliding_window_pattern",
            f"a list of {len(layer_is_window)}",
            f"must have one entry for each of the {layer_count} layers",
        )
    sizes = [window_size if is_window else full_size for is_window in layer_is_window]
    sharing_count = fields.header.integer(fields.name("attention.shared_kv_layers"), 0)
    has_window = any(layer_is_window)
    has_wide_mlp, intermediate_size = _mlp(fields, layer_count, layer_count - sharing_count)
    return Gemma4Config(
        **common,
        attention=tuple(
            AttentionShape(
                head_count=head_count,
                kv_head_count=kv_head_count,
                key_size=size,
                value_size=size,
            )
            for kv_head_count, size in zip(kv_head_counts, sizes, strict=True)
        ),
        kv_sharing_layer_count=sharing_count,
        has_values_from_keys=_has_values_from_keys(fields, layer_is_window),
        intermediate_size=intermediate_size,
        has_wide_mlp=has_wide_mlp,
        per_layer_inputs=_per_layer_inputs(fields, layer_count),
        experts=None,
        window=fields.count("attention.sliding_window") if has_window else None,
        layer_is_window=layer_is_window,
        rope=Rope(
            theta=fields.number("rope.freq_base"),
            size=full_size,
            turning_pairs=_turning_pairs(fields),
        ),
        rope_window=Rope(
            theta=fields.number("rope.freq_base_swa", ROPE_THETA_WINDOW), size=window_size
        )
        if has_window
        else None,
        embedding_scale=common["hidden_size"] ** 0.5,
        logit_cap=fields.number("final_logit_softcapping", 0.0) or None,
    )


def _refuse_what_is_not_supported(
    fields: ArchitectureFields, full_size: int, window_size: int
) -> None:
    """Raise `CheckpointError` for a feature that would silently give wrong answers."""
    for key, size in (
        ("attention.value_length", full_size),
        ("attention.value_length_swa", window_size),
        ("rope.dimension_count", full_size),
        ("rope.dimension_count_swa", window_size),
    ):
        value = fields.count(key, size)
        if value != size:
            raise fields.error(key, value, f"must be the head size of such layers ({size})")
    experts = fields.header.integer(fields.name("expert_count"), 0)
    if experts:
        raise fields.error(
            "expert_count", experts, "models with experts are read from folders only"
        )


def _mlp(fields: ArchitectureFields, layer_count: int, first_sharing: int) -> tuple[bool, int]:
    """Whether layers that share have an MLP of twice the size, and its size in the others."""
    widths = fields.counts("feed_forward_length", layer_count)
    for is_wide in (False, True):
        factors = [1 + (is_wide and layer >= first_sharing) for layer in range(layer_count)]
        if widths == [widths[0] * factor for factor in factors]:
            return is_wide, widths[0]
    raise fields.error(
        "feed_forward_length",
        widths,
        "must be the same for all layers, or twice as much for those that share keys",
    )


def _has_values_from_keys(
    fields: ArchitectureFields, layer_is_window: tuple[bool, ...]
) -> bool:
    """Such files have no projection for the values of full layers."""
    full = [layer for layer, is_window in enumerate(layer_is_window) if not is_window]
    tensors = fields.header.tensors
    return bool(full) and f"blk.{full[0]}.attn_v.weight" not in tensors


def _per_layer_inputs(fields: ArchitectureFields, layer_count: int) -> PerLayerInputs | None:
    width = fields.header.integer(fields.name("embedding_length_per_layer_input"), 0)
    if width == 0:
        return None
    table = fields.header.tensors.get(TOKEN_INPUTS)
    if table is None:
        raise CheckpointError(
            f"{fields.header.path}: tensor {TOKEN_INPUTS} is missing: the model's "
            f"{layer_count} layers have inputs of their own"
        )
    return PerLayerInputs(width=width, vocab_size=table.shape[0])


def _turning_pairs(fields: ArchitectureFields) -> int | None:
    """How many pairs of a full layer's head turn: the others' frequency is divided by more
    than any number of positions. None if there are no such factors.
    """
    factors = rope_factors(fields.header)
    if factors is None:
        return None
    count = sum(factor == 1 for factor in factors)
    still = factors[count:]
    if factors[:count] != (1.0,) * count or any(each < STILL_FACTOR_MIN for each in still):
        raise CheckpointError(
            f"{fields.header.path}: tensor {ROPE_FACTORS} must be 1 for the pairs that turn, "
            f"which come first, and at least {STILL_FACTOR_MIN:g} for the others"
        )
    return count
