"""Makes a `ModelConfig` from the fields of a GGUF file."""

from typing import Any

from tidegate.engine.checkpoint.config import (
    LAYER_COUNT_MAX,
    AttentionShape,
    Family,
    ModelConfig,
)
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gemma3 import Gemma3Config
from tidegate.engine.checkpoint.families.gemma4_from_gguf import gemma4_from_gguf
from tidegate.engine.checkpoint.families.llama import LlamaConfig
from tidegate.engine.checkpoint.gguf_factors import rope_factors
from tidegate.engine.checkpoint.gguf_fields import ArchitectureFields
from tidegate.engine.checkpoint.gguf_header import GgufHeader
from tidegate.engine.checkpoint.rope import FactorScaling, LinearScaling, Rope, Scaling

# The family of each architecture that files may name.
ARCHITECTURES: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "smollm3": "llama",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
}

# What files of Gemma 3 leave unsaid, as in the published configurations.
GEMMA3_FULL_LAYER_INTERVAL = 6
GEMMA3_ROPE_THETA_WINDOW = 10_000.0
GEMMA3_27B_LAYERS = 62
LLAMA_ROPE_THETA = 10_000.0
# Files of SmolLM3 do not say which layers know no positions: each fourth, as published.
SMOLLM3_NO_ROPE_INTERVAL = 4

# A file names one end token. A chat model also ends its turn, or its text, with one of these.
CHAT_END_TOKENS = (
    "<end_of_turn>",
    "<turn|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
)
CONTROL_TOKEN_KIND = 3


def config_from_gguf(header: GgufHeader, name: str, is_chat: bool) -> ModelConfig:
    """The configuration of the model in `header`, to be served as `name`.

    `is_chat` says that there is a chat template: then the end-of-turn tokens of the vocabulary
    end a generation too. Raises `CheckpointError` for an unknown architecture, for a feature
    that is not supported, and for a missing or impossible field.
    """
    architecture = _architecture(header)
    fields = ArchitectureFields(header, architecture)
    hidden_size = fields.count("embedding_length")
    layer_count = fields.count("block_count", count_max=LAYER_COUNT_MAX)
    vocabulary = header.texts("tokenizer.ggml.tokens")
    try:
        common: dict[str, Any] = {
            "name": name,
            "vocab_size": len(vocabulary),
            "hidden_size": hidden_size,
            "layer_count": layer_count,
            "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
            "tie_embeddings": "output.weight" not in header.tensors,
            "context": fields.count("context_length"),
            "bos_id": _optional_id(header, "tokenizer.ggml.bos_token_id"),
            "eos_ids": _eos_ids(header, vocabulary, is_chat),
        }
        if architecture == "gemma4":
            return gemma4_from_gguf(fields, common)
        common |= _heads_and_mlp(fields, hidden_size)
        return _gemma3(fields, common) if architecture == "gemma3" else _llama(fields, common)
    except CheckpointError as error:
        text = str(error)
        named = text if str(header.path) in text else f"{header.path}: {text}"
        raise CheckpointError(named) from None


def _heads_and_mlp(fields: ArchitectureFields, hidden_size: int) -> dict[str, Any]:
    """Of architectures whose layers are all alike."""
    head_count = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", hidden_size // head_count)
    _refuse_what_is_not_supported(fields, head_dim)
    return {
        "intermediate_size": fields.count("feed_forward_length"),
        "attention": AttentionShape(
            head_count=head_count,
            kv_head_count=fields.count("attention.head_count_kv", head_count),
            key_size=head_dim,
            value_size=head_dim,
        ),
    }


def _llama(fields: ArchitectureFields, common: dict[str, Any]) -> LlamaConfig:
    layer_count: int = common["layer_count"]
    head_dim: int = common["attention"].key_size
    interval = SMOLLM3_NO_ROPE_INTERVAL if fields.architecture == "smollm3" else None
    tensors = fields.header.tensors
    return LlamaConfig(
        **common,
        rope=_rope(fields, LLAMA_ROPE_THETA, head_dim),
        window=None,
        layer_is_window=(False,) * layer_count,
        layer_has_rope=tuple(
            interval is None or (layer + 1) % interval != 0 for layer in range(layer_count)
        ),
        has_query_key_norm="blk.0.attn_q_norm.weight" in tensors,
        has_query_key_value_bias="blk.0.attn_q.bias" in tensors,
        has_output_bias="blk.0.attn_output.bias" in tensors,
        has_mlp_bias="blk.0.ffn_gate.bias" in tensors,
    )


def _gemma3(fields: ArchitectureFields, common: dict[str, Any]) -> Gemma3Config:
    head_dim: int = common["attention"].key_size
    layer_is_window = _gemma3_layers(fields, common["layer_count"])
    rope_window = None
    window = None
    if any(layer_is_window):
        theta = fields.number("rope.freq_base_swa", GEMMA3_ROPE_THETA_WINDOW)
        rope_window = Rope(theta=theta, size=head_dim)
        window = fields.count("attention.sliding_window")
    # The score's scale is not in the file: it is the head size's, but in the largest model.
    scaled_by = head_dim
    if common["layer_count"] == GEMMA3_27B_LAYERS:
        scaled_by = common["hidden_size"] // common["attention"].head_count
    return Gemma3Config(
        **common,
        rope=_rope(fields, None, head_dim),
        rope_window=rope_window,
        window=window,
        layer_is_window=layer_is_window,
        query_scale=scaled_by**-0.5,
        embedding_scale=common["hidden_size"] ** 0.5,
    )


def _architecture(header: GgufHeader) -> str:
    found = header.text("general.architecture")
    if found not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: architecture {found} is not supported; those that are: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return found


def _refuse_what_is_not_supported(fields: ArchitectureFields, head_dim: int) -> None:
    """Raise `CheckpointError` for a feature that would silently give wrong answers."""
    for key, right in (
        ("attention.value_length", "must be the head size, as keys and values are alike"),
        ("rope.dimension_count", "must be the head size: partial rotation is not supported"),
    ):
        value = fields.count(key, head_dim)
        if value != head_dim:
            raise fields.error(key, value, f"{right} ({head_dim})")
    for key, neutral in (
        ("expert_count", 0.0),
        ("attn_logit_softcapping", 0.0),
        ("final_logit_softcapping", 0.0),
    ):
        number = fields.number(key, neutral)
        if number != neutral:
            raise fields.error(key, number, f"only {neutral:g} is supported")


def _rope(fields: ArchitectureFields, theta_default: float | None, head_dim: int) -> Rope:
    """The rotation of the layers that attend to all positions."""
    theta = fields.number("rope.freq_base", theta_default)
    return Rope(theta=theta, size=head_dim, scaling=_scaling(fields))


def _scaling(fields: ArchitectureFields) -> Scaling | None:
    factors = rope_factors(fields.header)
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", 1.0)
    if factors is not None:
        return FactorScaling(factors)
    # Files without a kind may have the factor alone.
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return LinearScaling(factor)
    if kind != "none":
        raise fields.error("rope.scaling.type", kind, "must be none or linear")
    return None


def _gemma3_layers(fields: ArchitectureFields, layer_count: int) -> tuple[bool, ...]:
    key = "attention.sliding_window_pattern"
    if fields.is_list(key):
        return tuple(fields.booleans(key))
    interval = fields.count(key, GEMMA3_FULL_LAYER_INTERVAL)
    return tuple((layer + 1) % interval != 0 for layer in range(layer_count))


def _optional_id(header: GgufHeader, key: str) -> int | None:
    return header.integer(key) if key in header.fields else None


def _eos_ids(header: GgufHeader, vocabulary: list[str], is_chat: bool) -> tuple[int, ...]:
    ids = [header.integer("tokenizer.ggml.eos_token_id")]
    if is_chat:
        kinds = header.integers("tokenizer.ggml.token_type")
        ids += [
            token_id
            for token_id, (text, kind) in enumerate(zip(vocabulary, kinds, strict=False))
            if kind == CONTROL_TOKEN_KIND and text in CHAT_END_TOKENS
        ]
    return tuple(dict.fromkeys(ids))
