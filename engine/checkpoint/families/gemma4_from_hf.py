"""Reads the config.json of a Gemma 4 model: a text model, or the text part of a larger one."""

from pathlib import Path

import msgspec

from tidegate.engine.checkpoint.config import COUNT_MAX, AttentionShape
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gemma4 import (
    ExpertSizes,
    Gemma4Config,
    PerLayerInputs,
)
from tidegate.engine.checkpoint.hf_fields import (
    FULL,
    WINDOW,
    HfFields,
    HfRope,
    ids,
    layers_of_types,
    only,
    power,
    rope_from_hf,
    within,
)
from tidegate.engine.checkpoint.rope import Rope
from tidegate.engine.checkpoint.small_file import read_json

FULL_LAYER_INTERVAL = 6  # Where a file says nothing about its layers.
DEFAULT_ROPES = {
    FULL: HfRope(rope_theta=1e6, rope_type="proportional", partial_rotary_factor=0.25),
    WINDOW: HfRope(rope_theta=1e4),
}


class _LayerFields(msgspec.Struct):
    """What one layer has otherwise than the file says for all."""

    head_dim: int | None = None
    num_key_value_heads: int | None = None


class _Gemma4(HfFields, kw_only=True):
    vocab_size: int = 262_144
    hidden_size: int = 2304
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    max_position_embeddings: int = 131_072
    intermediate_size: int = 9216
    num_key_value_heads: int = 4
    head_dim: int = 256
    # Of the full-attention layers, in published files.
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    # The same by layer, as transformers writes it; then the two above do not count.
    per_layer_config: dict[str, _LayerFields] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    layer_types: list[str] | None = None
    sliding_window: int = 512
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: int = 262_144
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    rope_parameters: dict[str, HfRope] | None = None
    final_logit_softcapping: float | None = None
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    use_bidirectional_attention: str | None = None


class _Multimodal(msgspec.Struct):
    """The file of a model that sees or hears."""

    text_config: _Gemma4
    eos_token_id: int | list[int] | None = None


def gemma4_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> Gemma4Config:
    source = read_json(path, _Gemma4)
    return _config(source, name, eos_ids or ids(source.eos_token_id))


def multimodal_gemma4_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> Gemma4Config:
    whole = read_json(path, _Multimodal)
    own = ids(whole.eos_token_id) or ids(whole.text_config.eos_token_id)
    return _config(whole.text_config, name, eos_ids or own)


def _config(source: _Gemma4, name: str, eos_ids: tuple[int, ...]) -> Gemma4Config:
    source.check()
    only("quantization_config", source.quantization_config, None)
    only("attention_bias", source.attention_bias, False)
    only("hidden_activation", source.hidden_activation, "gelu_pytorch_tanh")
    if source.use_bidirectional_attention != "vision":  # Which concerns images alone.
        only("use_bidirectional_attention", source.use_bidirectional_attention, None)
    layer_is_window = _layers(source)
    attention = _attention(source, layer_is_window)
    has_window = any(layer_is_window)
    inputs_width = source.hidden_size_per_layer_input

    def rope(layer_type: str) -> Rope:
        ropes = DEFAULT_ROPES if source.rope_parameters is None else source.rope_parameters
        heads = attention[layer_is_window.index(layer_type == WINDOW)]
        field, theta = f"rope_parameters.{layer_type}", DEFAULT_ROPES[layer_type].rope_theta
        if layer_type not in ropes or theta is None:
            raise CheckpointError(f"{field} is missing: the model has layers of this type")
        context = source.max_position_embeddings
        return rope_from_hf(field, ropes[layer_type], heads.key_size, context, theta=theta)

    return Gemma4Config(
        name=name,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        layer_count=source.num_hidden_layers,
        norm_eps=source.rms_norm_eps,
        window=source.sliding_window if has_window else None,
        layer_is_window=layer_is_window,
        tie_embeddings=source.tie_word_embeddings,
        context=source.max_position_embeddings,
        bos_id=source.bos_token_id,
        eos_ids=eos_ids,
        attention=attention,
        kv_sharing_layer_count=source.num_kv_shared_layers,
        has_values_from_keys=source.attention_k_eq_v,
        intermediate_size=source.intermediate_size,
        has_wide_mlp=source.use_double_wide_mlp,
        per_layer_inputs=None
        if inputs_width == 0
        else PerLayerInputs(width=inputs_width, vocab_size=source.vocab_size_per_layer_input),
        experts=_experts(source),
        rope=rope(FULL),
        rope_window=rope(WINDOW) if has_window else None,
        embedding_scale=power("hidden_size", source.hidden_size, 0.5),
        logit_cap=source.final_logit_softcapping,
    )


def _layers(source: _Gemma4) -> tuple[bool, ...]:
    """The last layer has full attention whatever the file says, as in transformers."""
    if source.layer_types is None:
        layers = [(n + 1) % FULL_LAYER_INTERVAL != 0 for n in range(source.num_hidden_layers)]
    else:
        layers = list(layers_of_types(source.layer_types))
    if len(layers) != source.num_hidden_layers:
        raise CheckpointError(
            f"layer_types has {len(layers)} entries: must have one for each of the "
            f"{source.num_hidden_layers} layers"
        )
    return (*layers[:-1], False)


def _attention(
    source: _Gemma4, layer_is_window: tuple[bool, ...]
) -> tuple[AttentionShape, ...]:
    """The heads of each layer, from either way to write them down."""
    full = _LayerFields(source.global_head_dim)
    if source.attention_k_eq_v:
        full.num_key_value_heads = source.num_global_key_value_heads
    special = {
        str(layer): full for layer, is_window in enumerate(layer_is_window) if not is_window
    }
    if source.per_layer_config is not None:
        special = source.per_layer_config
        unknown = set(special) - {str(layer) for layer in range(len(layer_is_window))}
        if unknown:
            raise CheckpointError(
                f"per_layer_config has {min(unknown)!r}: must be the number of a layer, from 0 "
                f"to {len(layer_is_window) - 1}"
            )
    shapes: list[AttentionShape] = []
    for layer in range(len(layer_is_window)):
        own = special.get(str(layer), _LayerFields())
        head_size = source.head_dim if own.head_dim is None else own.head_dim
        within("head_dim", head_size, COUNT_MAX)
        shapes.append(
            AttentionShape(
                head_count=source.num_attention_heads,
                kv_head_count=source.num_key_value_heads
                if own.num_key_value_heads is None
                else own.num_key_value_heads,
                key_size=head_size,
                value_size=head_size,
            )
        )
    return tuple(shapes)


def _experts(source: _Gemma4) -> ExpertSizes | None:
    if not source.enable_moe_block:
        return None

    def needed(field: str, value: int | None) -> int:
        if value is None:
            raise CheckpointError(f"{field} is missing: enable_moe_block is true")
        return value

    return ExpertSizes(
        count=needed("num_experts", source.num_experts),
        per_token=needed("top_k_experts", source.top_k_experts),
        width=needed("moe_intermediate_size", source.moe_intermediate_size),
    )
