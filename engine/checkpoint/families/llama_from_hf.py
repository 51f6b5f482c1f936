"""Reads the config.json of Llama and models of its shape, each with its own defaults."""

from pathlib import Path
from typing import Any

from tidegate.engine.checkpoint.config import COUNT_MAX, LAYER_COUNT_MAX, AttentionShape
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.llama import LlamaConfig
from tidegate.engine.checkpoint.hf_fields import (
    HfFields,
    HfRope,
    ids,
    layers_of_types,
    only,
    rope_from_hf,
    within,
)
from tidegate.engine.checkpoint.small_file import read_json


class _Llama(HfFields, kw_only=True):
    intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: HfRope | None = None
    rope_parameters: HfRope | None = None
    attention_bias: bool = False
    mlp_bias: bool = False


class _Mistral(_Llama, kw_only=True):
    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096


class _Qwen(_Llama, kw_only=True):
    num_key_value_heads: int | None = 32
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None


class _Qwen3(_Qwen, kw_only=True):
    head_dim: int | None = 128


class _SmolLm3(_Llama, kw_only=True):
    num_key_value_heads: int | None = 4
    tie_word_embeddings: bool = True
    rope_theta: float = 2_000_000.0
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4


def llama_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> LlamaConfig:
    source = read_json(path, _Llama)
    return _config(source, name, eos_ids)


def mistral_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> LlamaConfig:
    source = read_json(path, _Mistral)
    source.check()
    only("attention_bias", source.attention_bias, False)
    only("mlp_bias", source.mlp_bias, False)
    is_window = source.sliding_window is not None
    return _config(
        source,
        name,
        eos_ids,
        window=source.sliding_window,
        layer_is_window=(is_window,) * source.num_hidden_layers,
    )


def qwen2_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> LlamaConfig:
    source = read_json(path, _Qwen)
    source.check()
    only("mlp_bias", source.mlp_bias, False)
    return _config(
        source,
        name,
        eos_ids,
        has_query_key_value_bias=True,
        has_output_bias=False,
        **_qwen_windows(source),
    )


def qwen3_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> LlamaConfig:
    source = read_json(path, _Qwen3)
    source.check()
    only("mlp_bias", source.mlp_bias, False)
    return _config(source, name, eos_ids, has_query_key_norm=True, **_qwen_windows(source))


def smollm3_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> LlamaConfig:
    source = read_json(path, _SmolLm3)
    source.check()
    layer_count = source.num_hidden_layers
    if source.no_rope_layers is None:
        within("no_rope_layer_interval", source.no_rope_layer_interval, LAYER_COUNT_MAX)
        has_rope = tuple(
            (layer + 1) % source.no_rope_layer_interval != 0 for layer in range(layer_count)
        )
    else:
        if len(source.no_rope_layers) < layer_count:
            raise CheckpointError(
                f"no_rope_layers has {len(source.no_rope_layers)} entries: must have one for "
                f"each of the {layer_count} layers"
            )
        # The list says 1 for a layer that rotates, whatever its name; it may be too long.
        has_rope = tuple(bool(value) for value in source.no_rope_layers[:layer_count])
    window = source.sliding_window if source.use_sliding_window else None
    if source.layer_types is not None:
        layer_is_window = layers_of_types(source.layer_types)
    else:
        layer_is_window = tuple(window is not None and not rotates for rotates in has_rope)
    return _config(
        source,
        name,
        eos_ids,
        window=_window(source.sliding_window, layer_is_window),
        layer_is_window=layer_is_window,
        layer_has_rope=has_rope,
    )


def _qwen_windows(source: _Qwen) -> dict[str, Any]:
    """The first `max_window_layers` layers are full, unless `layer_types` says otherwise."""
    window = source.sliding_window if source.use_sliding_window else None
    if source.layer_types is not None:
        layer_is_window = layers_of_types(source.layer_types)
    else:
        layer_is_window = tuple(
            window is not None and layer >= source.max_window_layers
            for layer in range(source.num_hidden_layers)
        )
    return {
        "window": _window(window, layer_is_window),
        "layer_is_window": layer_is_window,
    }


def _window(window: int | None, layer_is_window: tuple[bool, ...]) -> int | None:
    return window if any(layer_is_window) else None


def _config(
    source: _Llama, name: str, eos_ids: tuple[int, ...], **differences: Any
) -> LlamaConfig:
    """The configuration of a Llama with these fields, but for what is different."""
    source.check()
    only("quantization_config", source.quantization_config, None)
    only("hidden_act", source.hidden_act, "silu")
    head_count = source.num_attention_heads
    head_dim = source.hidden_size // head_count if source.head_dim is None else source.head_dim
    within("head_dim", head_dim, COUNT_MAX)
    older = source.rope_scaling
    layer_count = source.num_hidden_layers
    fields: dict[str, Any] = {
        "window": None,
        "layer_is_window": (False,) * layer_count,
        "layer_has_rope": (True,) * layer_count,
        "has_query_key_norm": False,
        "has_query_key_value_bias": source.attention_bias,
        "has_output_bias": source.attention_bias,
        "has_mlp_bias": source.mlp_bias,
    }
    return LlamaConfig(
        name=name,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        layer_count=layer_count,
        attention=AttentionShape(
            head_count=head_count,
            kv_head_count=source.num_key_value_heads or head_count,
            key_size=head_dim,
            value_size=head_dim,
        ),
        norm_eps=source.rms_norm_eps,
        rope=rope_from_hf(
            "rope_parameters" if older is None else "rope_scaling",
            older or source.rope_parameters,
            head_dim,
            source.max_position_embeddings,
            theta=source.rope_theta,
        ),
        tie_embeddings=source.tie_word_embeddings,
        context=source.max_position_embeddings,
        bos_id=source.bos_token_id,
        eos_ids=eos_ids or ids(source.eos_token_id),
        **(fields | differences),
    )
