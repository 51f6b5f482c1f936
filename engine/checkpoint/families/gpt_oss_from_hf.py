"""Reads the config.json of a GPT-OSS model."""

from pathlib import Path

from tidegate.engine.checkpoint.config import COUNT_MAX, AttentionShape
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gpt_oss import GptOssConfig, GptOssExperts
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

# What holds where a file has no rotation of its own.
YARN = HfRope(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)


class _GptOss(HfFields, kw_only=True):
    intermediate_size: int  # Of each expert.
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    num_key_value_heads: int = 8
    head_dim: int = 64
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    tie_word_embeddings: bool = False
    rope_theta: float = 150_000.0
    rope_scaling: HfRope | None = None
    rope_parameters: HfRope | None = None
    sliding_window: int | None = 128
    layer_types: list[str] | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


def gpt_oss_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> GptOssConfig:
    source = read_json(path, _GptOss)
    source.check()
    method = (source.quantization_config or {}).get("quant_method")
    if source.quantization_config is not None and method != "mxfp4":
        raise CheckpointError(
            f"quantization_config.quant_method is {method}: only mxfp4 is supported"
        )
    only("hidden_act", source.hidden_act, "silu")
    within("head_dim", source.head_dim, COUNT_MAX)
    if source.layer_types is not None:
        layer_is_window = layers_of_types(source.layer_types)
    else:
        layer_is_window = tuple(n % 2 == 0 for n in range(source.num_hidden_layers))
    older = source.rope_scaling
    return GptOssConfig(
        name=name,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        layer_count=source.num_hidden_layers,
        attention=AttentionShape(
            head_count=source.num_attention_heads,
            kv_head_count=source.num_key_value_heads,
            key_size=source.head_dim,
            value_size=source.head_dim,
        ),
        norm_eps=source.rms_norm_eps,
        rope=rope_from_hf(
            "rope_parameters" if older is None else "rope_scaling",
            older or source.rope_parameters or YARN,
            source.head_dim,
            source.max_position_embeddings,
            theta=source.rope_theta,
        ),
        experts=GptOssExperts(
            count=source.num_local_experts,
            per_token=source.num_experts_per_tok,
            width=source.intermediate_size,
            swiglu_alpha=source.swiglu_alpha,
            swiglu_limit=source.swiglu_limit,
        ),
        has_attention_bias=source.attention_bias,
        window=source.sliding_window if any(layer_is_window) else None,
        layer_is_window=layer_is_window,
        tie_embeddings=source.tie_word_embeddings,
        context=source.max_position_embeddings,
        bos_id=source.bos_token_id,
        eos_ids=eos_ids or ids(source.eos_token_id),
    )
