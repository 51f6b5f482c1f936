"""Reads the config.json of a MiMo-V2-Flash model, as published or as transformers writes it."""

from pathlib import Path

from tidegate.engine.checkpoint.config import AttentionShape
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.mimo_v2 import MimoV2Config, MimoV2Experts
from tidegate.engine.checkpoint.hf_fields import (
    FULL,
    WINDOW,
    HfFields,
    HfRope,
    fp8_or_none,
    ids,
    layers_of_types,
    only,
    rope_from_hf,
)
from tidegate.engine.checkpoint.rope import Rope
from tidegate.engine.checkpoint.small_file import read_json

FULL_LAYER_INTERVAL = 6  # Where a file says nothing about its layers; the first is full too.
ROTATED_SHARE = 0.334
EXPERT_TYPES = {"dense": False, "sparse": True}


class _MimoV2(HfFields, kw_only=True):
    vocab_size: int = 152_576
    hidden_size: int = 4096
    num_hidden_layers: int = 48
    num_attention_heads: int = 64
    max_position_embeddings: int = 131_072
    intermediate_size: int = 16_384
    num_key_value_heads: int = 4
    head_dim: int = 192
    v_head_dim: int = 128
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_value_scale: float | None = 0.707
    sliding_window: int = 129
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    routed_scaling_factor: float | None = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    # As transformers writes it.
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    rope_parameters: dict[str, HfRope] | None = None
    # As published.
    layernorm_epsilon: float | None = None
    hybrid_layer_pattern: list[int] | None = None  # 1 for a window.
    moe_layer_freq: list[int] | None = None  # 1 for experts.
    sliding_window_size: int | None = None  # Positions before the query's own.
    swa_num_attention_heads: int | None = None
    swa_num_key_value_heads: int | None = None
    swa_head_dim: int | None = None
    swa_v_head_dim: int | None = None
    rope_theta: float = 5e6
    swa_rope_theta: float = 1e4
    partial_rotary_factor: float = ROTATED_SHARE
    rope_scaling: HfRope | None = None
    add_swa_attention_sink_bias: bool = True
    add_full_attention_sink_bias: bool = False
    n_shared_experts: int | None = None
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"


def mimo_v2_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> MimoV2Config:
    source = read_json(path, _MimoV2)
    source.check()
    fp8_or_none(source.quantization_config)
    only("hidden_act", source.hidden_act, "silu")
    only("add_swa_attention_sink_bias", source.add_swa_attention_sink_bias, True)
    only("add_full_attention_sink_bias", source.add_full_attention_sink_bias, False)
    only("n_shared_experts", source.n_shared_experts or None, None)
    only("scoring_func", source.scoring_func, "sigmoid")
    only("topk_method", source.topk_method, "noaux_tc")
    layer_is_window = _windows(source)
    layer_has_experts = _experts_of_layers(source)
    window = source.sliding_window
    if source.sliding_window_size is not None:
        window = source.sliding_window_size + 1
    has_window = any(layer_is_window)
    full_heads, window_heads = _full_heads(source), _window_heads(source)
    value_scale = source.attention_value_scale
    eps = source.layernorm_epsilon
    return MimoV2Config(
        name=name,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        layer_count=source.num_hidden_layers,
        norm_eps=source.rms_norm_eps if eps is None else eps,
        window=window if has_window else None,
        layer_is_window=layer_is_window,
        tie_embeddings=source.tie_word_embeddings,
        context=source.max_position_embeddings,
        bos_id=source.bos_token_id,
        eos_ids=eos_ids or ids(source.eos_token_id),
        attention=tuple(window_heads if each else full_heads for each in layer_is_window),
        has_attention_bias=source.attention_bias,
        value_scale=1.0 if value_scale is None else value_scale,
        rope=_rope(source, FULL, full_heads.key_size),
        rope_window=_rope(source, WINDOW, window_heads.key_size) if has_window else None,
        intermediate_size=source.intermediate_size,
        layer_has_experts=layer_has_experts,
        experts=_experts(source) if any(layer_has_experts) else None,
    )


def _windows(source: _MimoV2) -> tuple[bool, ...]:
    if source.layer_types is not None:
        return layers_of_types(source.layer_types)
    if source.hybrid_layer_pattern is not None:
        return _zeros_and_ones("hybrid_layer_pattern", source.hybrid_layer_pattern)
    return tuple(
        n > 0 and (n + 1) % FULL_LAYER_INTERVAL != 0 for n in range(source.num_hidden_layers)
    )


def _experts_of_layers(source: _MimoV2) -> tuple[bool, ...]:
    if source.mlp_layer_types is not None:
        for layer_type in source.mlp_layer_types:
            if layer_type not in EXPERT_TYPES:
                raise CheckpointError(
                    f"mlp_layer_types has {layer_type}: supported are dense and sparse"
                )
        return tuple(EXPERT_TYPES[layer_type] for layer_type in source.mlp_layer_types)
    if source.moe_layer_freq is not None:
        return _zeros_and_ones("moe_layer_freq", source.moe_layer_freq)
    return tuple(n > 0 for n in range(source.num_hidden_layers))


def _zeros_and_ones(field: str, values: list[int]) -> tuple[bool, ...]:
    for value in values:
        if value not in (0, 1):
            raise CheckpointError(f"{field} has {value}: must be 0 or 1 for each layer")
    return tuple(value == 1 for value in values)


def _full_heads(source: _MimoV2) -> AttentionShape:
    return AttentionShape(
        head_count=source.num_attention_heads,
        kv_head_count=source.num_key_value_heads,
        key_size=source.head_dim,
        value_size=source.v_head_dim,
    )


def _window_heads(source: _MimoV2) -> AttentionShape:
    """Twice as many key heads as a full layer has, unless the file says otherwise."""

    def own(value: int | None, other: int) -> int:
        return other if value is None else value

    return AttentionShape(
        head_count=own(source.swa_num_attention_heads, source.num_attention_heads),
        kv_head_count=own(source.swa_num_key_value_heads, 2 * source.num_key_value_heads),
        key_size=own(source.swa_head_dim, source.head_dim),
        value_size=own(source.swa_v_head_dim, source.v_head_dim),
    )


def _rope(source: _MimoV2, layer_type: str, key_size: int) -> Rope:
    theta = source.rope_theta if layer_type == FULL else source.swa_rope_theta
    context = source.max_position_embeddings
    if source.rope_parameters is None:
        rope = source.rope_scaling or HfRope()
        rope.partial_rotary_factor = source.partial_rotary_factor
        return rope_from_hf("rope_scaling", rope, key_size, context, theta=theta)
    field = f"rope_parameters.{layer_type}"
    if layer_type not in source.rope_parameters:
        raise CheckpointError(f"{field} is missing: the model has layers of this type")
    rope = source.rope_parameters[layer_type]
    is_default = (rope.rope_type or rope.type or "default") == "default"
    if is_default and rope.partial_rotary_factor is None:
        rope.partial_rotary_factor = ROTATED_SHARE
    return rope_from_hf(field, rope, key_size, context, theta=theta)


def _experts(source: _MimoV2) -> MimoV2Experts:
    scale = source.routed_scaling_factor
    return MimoV2Experts(
        count=source.n_routed_experts,
        per_token=source.num_experts_per_tok,
        width=source.moe_intermediate_size,
        group_count=source.n_group,
        groups_per_token=source.topk_group,
        normalises_weights=source.norm_topk_prob,
        weight_scale=1.0 if scale is None else scale,
    )
