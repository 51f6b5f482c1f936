"""Makes a tiny random checkpoint of any kind of model that is served, by its name.

    PYTHONPATH=tests .venv/bin/python -m oracle.make_tiny_models gemma4-experts /tmp/tiny
    .venv/bin/tidegate serve /tmp/tiny --dtype float32

The folder is as published ones are: config.json, weights in several safetensors files with an
index, and a tokenizer.json that was trained on the spot. Weights are drawn so large that greedy
output goes through many tokens. Without a name it lists the names.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from oracle.make_tiny_checkpoint import TinyFamily, make_tiny_checkpoint

SHARD_BYTES_MAX = 100_000
WINDOW = 32


@dataclass(frozen=True)
class TinyModel:
    """`fields` are what its configuration has otherwise than `make_tiny_checkpoint` says."""

    family: TinyFamily
    has_windows: bool = True
    classes: tuple[Any, Any] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _llama(classes: tuple[Any, Any] | None, *, has_windows: bool, **fields: Any) -> TinyModel:
    return TinyModel("llama", has_windows, classes, MappingProxyType(fields))


MISTRAL: tuple[Any, Any] = (MistralConfig, MistralForCausalLM)
QWEN2: tuple[Any, Any] = (Qwen2Config, Qwen2ForCausalLM)
QWEN3: tuple[Any, Any] = (Qwen3Config, Qwen3ForCausalLM)
SMOLLM3: tuple[Any, Any] = (SmolLM3Config, SmolLM3ForCausalLM)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TINY_MODELS: Mapping[str, TinyModel] = MappingProxyType(
    {
        "llama": _llama(None, has_windows=False, tie_word_embeddings=False),
        "llama3": _llama(None, has_windows=False, rope_parameters=LLAMA3_ROPE),
        "mistral": _llama(MISTRAL, has_windows=True, sliding_window=WINDOW),
        "qwen2": _llama(QWEN2, has_windows=False),
        # The upper half of the layers has a window.
        "qwen2-windows": _llama(
            QWEN2,
            has_windows=True,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=2,
        ),
        "qwen3": _llama(QWEN3, has_windows=False),
        # Every fourth layer rotates nothing.
        "smollm3": _llama(SMOLLM3, has_windows=False, pad_token_id=None),
        "gemma3": TinyModel("gemma3"),
        "gemma4": TinyModel("gemma4"),
        "gemma4-experts": TinyModel(
            "gemma4",
            fields=MappingProxyType(
                {
                    "enable_moe_block": True,
                    "num_experts": 8,
                    "top_k_experts": 2,
                    "moe_intermediate_size": 32,
                    "num_kv_shared_layers": 0,
                    "hidden_size_per_layer_input": 0,
                }
            ),
        ),
        "gpt_oss": TinyModel("gpt_oss"),
        "mimo_v2": TinyModel("mimo_v2"),
        "deepseek_v4": TinyModel("deepseek_v4"),
    }
)


def make_tiny_model(folder: Path, name: str) -> Path:
    """Write the model of this name into `folder`, and return it. Always the same one."""
    model = TINY_MODELS[name]
    return make_tiny_checkpoint(
        folder,
        model.family,
        shard_bytes_max=SHARD_BYTES_MAX,
        classes=model.classes,
        **model.fields,
    )


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in TINY_MODELS:
        print("usage: python -m oracle.make_tiny_models NAME FOLDER", file=sys.stderr)
        print(f"NAME is one of {', '.join(TINY_MODELS)}", file=sys.stderr)
        return 2
    print(make_tiny_model(Path(arguments[1]), arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
