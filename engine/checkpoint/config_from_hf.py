"""Makes a `ModelConfig` from the config.json of a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from tidegate.engine.checkpoint.config import Family, ModelConfig
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.deepseek_v4_from_hf import deepseek_v4_from_hf
from tidegate.engine.checkpoint.families.gemma3_from_hf import (
    gemma3_from_hf,
    multimodal_gemma3_from_hf,
)
from tidegate.engine.checkpoint.families.gemma4_from_hf import (
    gemma4_from_hf,
    multimodal_gemma4_from_hf,
)
from tidegate.engine.checkpoint.families.gpt_oss_from_hf import gpt_oss_from_hf
from tidegate.engine.checkpoint.families.llama_from_hf import (
    llama_from_hf,
    mistral_from_hf,
    qwen2_from_hf,
    qwen3_from_hf,
    smollm3_from_hf,
)
from tidegate.engine.checkpoint.families.mimo_v2_from_hf import mimo_v2_from_hf
from tidegate.engine.checkpoint.hf_fields import ids
from tidegate.engine.checkpoint.small_file import read_json

# Reads config.json at the path. The end tokens are those of generation_config.json, which go
# before the file's own; there may be none.
Read = Callable[[Path, str, tuple[int, ...]], ModelConfig]

ARCHITECTURES: dict[str, tuple[Family, Read]] = {
    "LlamaForCausalLM": ("llama", llama_from_hf),
    "MistralForCausalLM": ("llama", mistral_from_hf),
    "Qwen2ForCausalLM": ("llama", qwen2_from_hf),
    "Qwen3ForCausalLM": ("llama", qwen3_from_hf),
    "SmolLM3ForCausalLM": ("llama", smollm3_from_hf),
    "Gemma3ForCausalLM": ("gemma3", gemma3_from_hf),
    "Gemma3ForConditionalGeneration": ("gemma3", multimodal_gemma3_from_hf),
    "Gemma4ForCausalLM": ("gemma4", gemma4_from_hf),
    "Gemma4ForConditionalGeneration": ("gemma4", multimodal_gemma4_from_hf),
    "GptOssForCausalLM": ("gpt_oss", gpt_oss_from_hf),
    "MiMoV2FlashForCausalLM": ("mimo_v2", mimo_v2_from_hf),
    "DeepseekV4ForCausalLM": ("deepseek_v4", deepseek_v4_from_hf),
}


class _Architectures(msgspec.Struct):
    architectures: list[str] | None = None


class _Generation(msgspec.Struct):
    """The field of generation_config.json that matters: it overrules the one in config.json."""

    eos_token_id: int | list[int] | None = None


def config_from_hf(folder: Path, name: str) -> ModelConfig:
    """The configuration of the model in `folder`, to be served as `name`.

    Where a field may be absent, transformers' default for the architecture holds. Raises
    `CheckpointError` for an unknown architecture, for a feature that is not supported, and for
    a missing or impossible field.
    """
    path = folder / "config.json"
    read = _reader(path)
    generation_path = folder / "generation_config.json"
    generation = _Generation()
    if generation_path.exists():
        generation = read_json(generation_path, _Generation)
    try:
        return read(path, name, ids(generation.eos_token_id))
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if str(path) in text else f"{path}: {text}") from None


def _reader(path: Path) -> Read:
    architectures = read_json(path, _Architectures).architectures or []
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture][1]
    found = ", ".join(architectures) or "empty"
    known = ", ".join(f"{key} (family {family})" for key, (family, _) in ARCHITECTURES.items())
    raise CheckpointError(f"{path}: architectures is {found}: supported are {known}")
