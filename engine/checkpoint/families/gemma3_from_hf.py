"""Reads the config.json of a Gemma 3 model: a text model, or the text part of a larger one."""

from pathlib import Path

import msgspec

from tidegate.engine.checkpoint.config import COUNT_MAX, LAYER_COUNT_MAX, AttentionShape
from tidegate.engine.checkpoint.families.gemma3 import Gemma3Config
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


class _Gemma3(HfFields, kw_only=True):
    vocab_size: int = 262_208
    hidden_size: int = 2304
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    max_position_embeddings: int = 131_072
    intermediate_size: int = 9216
    num_key_value_heads: int = 4
    head_dim: int = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    rope_scaling: HfRope | None = None  # Of the full-attention layers.
    rope_parameters: dict[str, HfRope] | None = None
    query_pre_attn_scalar: float = 256.0
    sliding_window: int = 4096
    sliding_window_pattern: int | None = None
    older_pattern: int | None = msgspec.field(default=None, name="_sliding_window_pattern")
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None


class _Multimodal(msgspec.Struct):
    """The file of a model that sees."""

    text_config: _Gemma3
    eos_token_id: int | list[int] | None = None


def gemma3_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> Gemma3Config:
    source = read_json(path, _Gemma3)
    return _config(source, name, eos_ids or ids(source.eos_token_id))


def multimodal_gemma3_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> Gemma3Config:
    whole = read_json(path, _Multimodal)
    own = ids(whole.eos_token_id) or ids(whole.text_config.eos_token_id)
    return _config(whole.text_config, name, eos_ids or own)


def _config(source: _Gemma3, name: str, eos_ids: tuple[int, ...]) -> Gemma3Config:
    source.check()
    only("quantization_config", source.quantization_config, None)
    only("attention_bias", source.attention_bias, False)
    only("hidden_activation", source.hidden_activation, "gelu_pytorch_tanh")
    only("attn_logit_softcapping", source.attn_logit_softcapping, None)
    only("use_bidirectional_attention", bool(source.use_bidirectional_attention), False)
    within("head_dim", source.head_dim, COUNT_MAX)
    layer_is_window = _layers(source)
    has_window = any(layer_is_window)
    heads = AttentionShape(
        head_count=source.num_attention_heads,
        kv_head_count=source.num_key_value_heads,
        key_size=source.head_dim,
        value_size=source.head_dim,
    )

    def rope(layer_type: str, older: HfRope | None, theta: float) -> Rope:
        newer = (source.rope_parameters or {}).get(layer_type)
        field = "rope_scaling" if newer is None else f"rope_parameters.{layer_type}"
        context = source.max_position_embeddings
        return rope_from_hf(field, newer or older, heads.key_size, context, theta=theta)

    return Gemma3Config(
        name=name,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        layer_count=source.num_hidden_layers,
        attention=heads,
        norm_eps=source.rms_norm_eps,
        rope=rope(FULL, source.rope_scaling, source.rope_theta),
        rope_window=rope(WINDOW, None, source.rope_local_base_freq) if has_window else None,
        window=source.sliding_window if has_window else None,
        layer_is_window=layer_is_window,
        query_scale=power("query_pre_attn_scalar", source.query_pre_attn_scalar, -0.5),
        embedding_scale=power("hidden_size", source.hidden_size, 0.5),
        tie_embeddings=source.tie_word_embeddings,
        context=source.max_position_embeddings,
        bos_id=source.bos_token_id,
        eos_ids=eos_ids,
        logit_cap=source.final_logit_softcapping,
    )


def _layers(source: _Gemma3) -> tuple[bool, ...]:
    if source.layer_types is not None:
        return layers_of_types(source.layer_types)
    interval = source.sliding_window_pattern or source.older_pattern or FULL_LAYER_INTERVAL
    within("sliding_window_pattern", interval, LAYER_COUNT_MAX)
    return tuple((layer + 1) % interval != 0 for layer in range(source.num_hidden_layers))
