"""Makes a `ModelConfig` from the fields of a GGUF file."""

from typing import Any, Literal

import numpy as np

from tidegate.engine.checkpoint.config import (
    COUNT_MAX,
    LAYER_COUNT_MAX,
    AttentionShape,
    ModelConfig,
)
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gemma3 import Gemma3Config
from tidegate.engine.checkpoint.families.llama import LlamaConfig
from tidegate.engine.checkpoint.gguf_header import GgufHeader
from tidegate.engine.checkpoint.rope import Rope

Architecture = Literal["llama", "gemma3"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "gemma3")

# What files of Gemma 3 leave unsaid, as in the published configurations.
GEMMA3_FULL_LAYER_INTERVAL = 6
GEMMA3_ROPE_THETA_WINDOW = 10_000.0
LLAMA_ROPE_THETA = 10_000.0

# A file names one end token. A chat model also ends its turn, or its text, with one of these.
CHAT_END_TOKENS = (
    "<end_of_turn>",
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
    fields = _ArchitectureFields(header, architecture)
    head_count = fields.count("attention.head_count")
    hidden_size = fields.count("embedding_length")
    layer_count = fields.count("block_count", count_max=LAYER_COUNT_MAX)
    head_dim = fields.count("attention.key_length", hidden_size // head_count)
    _refuse_what_is_not_supported(fields, head_dim)
    vocabulary = header.texts("tokenizer.ggml.tokens")
    try:
        common: dict[str, Any] = {
            "name": name,
            "vocab_size": len(vocabulary),
            "hidden_size": hidden_size,
            "intermediate_size": fields.count("feed_forward_length"),
            "layer_count": layer_count,
            "attention": AttentionShape(
                head_count=head_count,
                kv_head_count=fields.count("attention.head_count_kv", head_count),
                key_size=head_dim,
                value_size=head_dim,
            ),
            "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
            "tie_embeddings": "output.weight" not in header.tensors,
            "context": fields.count("context_length"),
            "bos_id": _optional_id(header, "tokenizer.ggml.bos_token_id"),
            "eos_ids": _eos_ids(header, vocabulary, is_chat),
        }
        if architecture == "gemma3":
            return _gemma3(fields, common, head_dim)
        return _llama(fields, common, head_dim)
    except CheckpointError as error:
        text = str(error)
        named = text if str(header.path) in text else f"{header.path}: {text}"
        raise CheckpointError(named) from None


def _llama(fields: "_ArchitectureFields", common: dict[str, Any], head_dim: int) -> LlamaConfig:
    layer_count: int = common["layer_count"]
    return LlamaConfig(
        **common,
        rope=Rope(theta=fields.number("rope.freq_base", LLAMA_ROPE_THETA), size=head_dim),
        window=None,
        layer_is_window=(False,) * layer_count,
        layer_has_rope=(True,) * layer_count,
        has_query_key_norm=False,
        has_query_key_value_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
    )


def _gemma3(
    fields: "_ArchitectureFields", common: dict[str, Any], head_dim: int
) -> Gemma3Config:
    layer_is_window = _gemma3_layers(fields, common["layer_count"])
    rope_window = None
    window = None
    if any(layer_is_window):
        theta = fields.number("rope.freq_base_swa", GEMMA3_ROPE_THETA_WINDOW)
        rope_window = Rope(theta=theta, size=head_dim)
        window = fields.count("attention.sliding_window")
    return Gemma3Config(
        **common,
        rope=Rope(theta=fields.number("rope.freq_base"), size=head_dim),
        rope_window=rope_window,
        window=window,
        layer_is_window=layer_is_window,
        query_scale=head_dim**-0.5,
        embedding_scale=common["hidden_size"] ** 0.5,
    )


class _ArchitectureFields:
    """The fields whose names begin with the architecture."""

    def __init__(self, header: GgufHeader, architecture: Architecture) -> None:
        self.header = header
        self.architecture = architecture

    def count(self, key: str, default: int | None = None, *, count_max: int = COUNT_MAX) -> int:
        """An integer from 1 to `count_max`."""
        value = self.header.integer(self._name(key), default)
        if not 1 <= value <= count_max:
            raise self.error(key, value, f"must be from 1 to {count_max}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number with the fewest digits that give the same 32 bits.

        So 1e-5, which the file can only hold in 32 bits, is again the 1e-5 that was meant.
        """
        return float(str(np.float32(self.header.number(self._name(key), default))))

    def text(self, key: str, default: str) -> str:
        return self.header.text(self._name(key), default)

    def booleans(self, key: str) -> list[bool]:
        return self.header.booleans(self._name(key))

    def is_list(self, key: str) -> bool:
        return isinstance(self.header.fields.get(self._name(key)), tuple)

    def error(self, key: str, value: object, right: str) -> CheckpointError:
        return CheckpointError(
            f"{self.header.path}: field {self._name(key)} is {value}: {right}"
        )

    def _name(self, key: str) -> str:
        return f"{self.architecture}.{key}"


def _architecture(header: GgufHeader) -> Architecture:
    found = header.text("general.architecture")
    for architecture in ARCHITECTURES:
        if architecture == found:
            return architecture
    raise CheckpointError(
        f"{header.path}: architecture {found} is not supported; those that are: "
        f"{', '.join(ARCHITECTURES)}"
    )


def _refuse_what_is_not_supported(fields: _ArchitectureFields, head_dim: int) -> None:
    """Raise `CheckpointError` for a feature that would silently give wrong answers."""
    for key, right in (
        ("attention.value_length", "must be the head size, as keys and values are alike"),
        ("rope.dimension_count", "must be the head size: partial rotation is not supported"),
    ):
        value = fields.count(key, head_dim)
        if value != head_dim:
            raise fields.error(key, value, f"{right} ({head_dim})")
    scaling = fields.text("rope.scaling.type", "none")
    if scaling != "none":
        raise fields.error("rope.scaling.type", scaling, "rope scaling is not supported")
    for key, neutral in (
        ("rope.scaling.factor", 1.0),
        ("expert_count", 0.0),
        ("attn_logit_softcapping", 0.0),
        ("final_logit_softcapping", 0.0),
    ):
        number = fields.number(key, neutral)
        if number != neutral:
            raise fields.error(key, number, f"only {neutral:g} is supported")
    if "rope_freqs.weight" in fields.header.tensors:
        raise CheckpointError(
            f"{fields.header.path}: tensor rope_freqs.weight: rope scaling is not supported"
        )


def _gemma3_layers(fields: _ArchitectureFields, layer_count: int) -> tuple[bool, ...]:
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
