"""Makes a `ModelConfig` from the config.json of a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

import msgspec

from tidegate.engine.checkpoint.config import COUNT_MAX, LAYER_COUNT_MAX, Family, ModelConfig
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.small_file import read_json

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Gemma3ForCausalLM": "gemma3",
}
FULL = "full_attention"
WINDOW = "sliding_attention"
FULL_LAYER_INTERVAL = 6  # Gemma 3, where a file says nothing about its layers.


class _Rope(msgspec.Struct):
    """A rotary embedding, in `rope_parameters` or in the older `rope_scaling`."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None  # The older name of `rope_type`.


class _Common(msgspec.Struct, kw_only=True):
    """The fields that both families share. Those with a default may be absent."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    rope_scaling: _Rope | None = None
    quantization_config: dict[str, Any] | None = None


class _Llama(_Common, kw_only=True):
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_parameters: _Rope | None = None


class _Gemma3(_Common, kw_only=True):
    num_key_value_heads: int
    head_dim: int = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    rope_parameters: dict[str, _Rope] | None = None
    query_pre_attn_scalar: float = 256.0
    sliding_window: int = 4096
    sliding_window_pattern: int | None = None
    older_pattern: int | None = msgspec.field(default=None, name="_sliding_window_pattern")
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None


class _Architectures(msgspec.Struct):
    architectures: list[str] | None = None


class _Generation(msgspec.Struct):
    """The field of generation_config.json that matters: it overrules the one in config.json."""

    eos_token_id: int | list[int] | None = None


def config_from_hf(folder: Path, name: str) -> ModelConfig:
    """The configuration of the model in `folder`, to be served as `name`.

    Where a field may be absent, transformers' default for the family holds. Raises
    `CheckpointError` for an unknown architecture, for a feature that is not supported, and for
    a missing or impossible field.
    """
    path = folder / "config.json"
    family = _family(path)
    source: _Llama | _Gemma3
    source = read_json(path, _Llama) if family == "llama" else read_json(path, _Gemma3)
    generation_path = folder / "generation_config.json"
    generation = _Generation()
    if generation_path.exists():
        generation = read_json(generation_path, _Generation)
    eos_ids = _ids(generation.eos_token_id) or _ids(source.eos_token_id)
    try:
        _refuse_in_both(source)
        if isinstance(source, _Llama):
            return _from_llama(source, name, eos_ids)
        return _from_gemma3(source, name, eos_ids)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _family(path: Path) -> Family:
    architectures = read_json(path, _Architectures).architectures or []
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    found = ", ".join(architectures) or "empty"
    known = ", ".join(f"{key} (family {family})" for key, family in ARCHITECTURES.items())
    raise CheckpointError(f"{path}: architectures is {found}: supported are {known}")


def _from_llama(source: _Llama, name: str, eos_ids: tuple[int, ...]) -> ModelConfig:
    head_count = source.num_attention_heads
    head_dim = source.hidden_size // head_count if source.head_dim is None else source.head_dim
    rope = source.rope_parameters or _Rope()
    _only("hidden_act", source.hidden_act, "silu")
    _only("mlp_bias", source.mlp_bias, False)
    _refuse_rope_scaling("rope_parameters", rope)
    return ModelConfig(
        family="llama",
        name=name,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        layer_count=source.num_hidden_layers,
        head_count=head_count,
        kv_head_count=source.num_key_value_heads or head_count,
        head_dim=head_dim,
        norm_eps=source.rms_norm_eps,
        rope_theta=source.rope_theta if rope.rope_theta is None else rope.rope_theta,
        rope_theta_window=None,
        window=None,
        layer_is_window=(False,) * source.num_hidden_layers,
        query_scale=_power("head_dim", head_dim, -0.5),
        embedding_scale=1.0,
        tie_embeddings=source.tie_word_embeddings,
        context=source.max_position_embeddings,
        bos_id=source.bos_token_id,
        eos_ids=eos_ids,
    )


def _from_gemma3(source: _Gemma3, name: str, eos_ids: tuple[int, ...]) -> ModelConfig:
    _only("hidden_activation", source.hidden_activation, "gelu_pytorch_tanh")
    _only("attn_logit_softcapping", source.attn_logit_softcapping, None)
    _only("final_logit_softcapping", source.final_logit_softcapping, None)
    _only("use_bidirectional_attention", bool(source.use_bidirectional_attention), False)
    layer_is_window = _gemma3_layers(source)
    has_window = any(layer_is_window)
    ropes = source.rope_parameters or {}
    for layer_type, rope in ropes.items():
        _refuse_rope_scaling(f"rope_parameters.{layer_type}", rope)
    theta = ropes.get(FULL, _Rope()).rope_theta
    theta_window = ropes.get(WINDOW, _Rope()).rope_theta
    if theta_window is None:
        theta_window = source.rope_local_base_freq
    return ModelConfig(
        family="gemma3",
        name=name,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        layer_count=source.num_hidden_layers,
        head_count=source.num_attention_heads,
        kv_head_count=source.num_key_value_heads,
        head_dim=source.head_dim,
        norm_eps=source.rms_norm_eps,
        rope_theta=source.rope_theta if theta is None else theta,
        rope_theta_window=theta_window if has_window else None,
        window=source.sliding_window if has_window else None,
        layer_is_window=layer_is_window,
        query_scale=_power("query_pre_attn_scalar", source.query_pre_attn_scalar, -0.5),
        embedding_scale=_power("hidden_size", source.hidden_size, 0.5),
        tie_embeddings=source.tie_word_embeddings,
        context=source.max_position_embeddings,
        bos_id=source.bos_token_id,
        eos_ids=eos_ids,
    )


def _gemma3_layers(source: _Gemma3) -> tuple[bool, ...]:
    if source.layer_types is not None:
        for layer_type in source.layer_types:
            if layer_type not in (FULL, WINDOW):
                raise CheckpointError(
                    f"layer_types has {layer_type}: supported are {FULL} and {WINDOW}"
                )
        return tuple(layer_type == WINDOW for layer_type in source.layer_types)
    interval = source.sliding_window_pattern or source.older_pattern or FULL_LAYER_INTERVAL
    _within("sliding_window_pattern", interval, LAYER_COUNT_MAX)
    return tuple((layer + 1) % interval != 0 for layer in range(source.num_hidden_layers))


def _refuse_in_both(source: _Common) -> None:
    _within("num_attention_heads", source.num_attention_heads, COUNT_MAX)
    _within("num_hidden_layers", source.num_hidden_layers, LAYER_COUNT_MAX)
    _only("attention_bias", source.attention_bias, False)
    _only("quantization_config", source.quantization_config, None)
    _refuse_rope_scaling("rope_scaling", source.rope_scaling or _Rope())


def _refuse_rope_scaling(field: str, rope: _Rope) -> None:
    kind = rope.rope_type or rope.type or "default"
    if kind != "default":
        raise CheckpointError(f"{field} has the type {kind}: rope scaling is not supported")


def _only(field: str, value: object, supported: object) -> None:
    if value != supported:
        shown = json.dumps(value)
        raise CheckpointError(f"{field} is {shown}: only {json.dumps(supported)} is supported")


def _within(field: str, value: int, count_max: int) -> None:
    if not 1 <= value <= count_max:
        raise CheckpointError(f"{field} is {value}: must be from 1 to {count_max}")


def _power(field: str, value: float, exponent: float) -> float:
    if value <= 0:
        raise CheckpointError(f"{field} is {value}: must be a positive number")
    return float(value**exponent)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(dict.fromkeys(value)) if isinstance(value, list) else (value,)
