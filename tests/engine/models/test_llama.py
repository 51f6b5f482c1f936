"""Models of Llama's shape through the checks of families: Llama 3, Mistral, Qwen, SmolLM3."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import (
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from fakes.family_checks import CHECKS
from fakes.tiny_family import FamilyModels, TinyCase, load
from tidegate.engine.checkpoint.families import llama

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


def case(config: Callable[..., Any], page_tokens: int, name: str, **fields: Any) -> TinyCase:
    return TinyCase(name, lambda: config(**SIZES | fields), page_tokens)


CASES = [
    case(LlamaConfig, 1, "Llama: pages of one token, equal heads", num_key_value_heads=4),
    case(LlamaConfig, 16, "Llama: one key head", num_key_value_heads=1),
    case(LlamaConfig, 4, "Llama 3: scaled rotation", rope_parameters=LLAMA3),
    case(LlamaConfig, 8, "Llama: biases everywhere", attention_bias=True, mlp_bias=True),
    case(
        LlamaConfig,
        4,
        "Llama: linear scaling",
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ),
    case(MistralConfig, 4, "Mistral: a window of some pages", sliding_window=12),
    case(MistralConfig, 8, "Mistral: a window smaller than a page", sliding_window=5),
    case(MistralConfig, 4, "Mistral: a window that is no multiple", sliding_window=23),
    case(MistralConfig, 8, "Mistral without a window", sliding_window=None),
    case(Qwen2Config, 4, "Qwen 2: biases", tie_word_embeddings=True),
    case(
        Qwen2Config,
        4,
        "Qwen 2: windows from a layer on",
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
        num_hidden_layers=3,
    ),
    case(Qwen3Config, 8, "Qwen 3: query and key norms", rope_parameters=YARN),
    case(
        Qwen3Config,
        4,
        "Qwen 3: norms, biases and layers by type",
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    case(
        SmolLM3Config,
        4,
        "SmolLM3: one layer of four without rotation",
        num_hidden_layers=4,
        attention_bias=True,
    ),
    case(
        SmolLM3Config,
        8,
        "SmolLM3: layers without rotation have a window",
        num_hidden_layers=3,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=6,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_family_is_as_its_layout_says(
    case: TinyCase, check: Callable[[FamilyModels], None]
) -> None:
    check(load(case))


def features(config: llama.LlamaConfig) -> dict[str, bool]:
    return {
        "query and key norms": config.has_query_key_norm,
        "input biases": config.has_query_key_value_bias,
        "output biases": config.has_output_bias,
        "biases in the MLP": config.has_mlp_bias,
        "tied embeddings": config.tie_embeddings,
        "rotation everywhere": all(config.layer_has_rope),
        "window layers": config.has_window_layers,
        "full layers": not all(config.layer_is_window),
        "a scaled rotation": config.rope.scaling is not None,
    }


def test_the_cases_have_every_feature_of_the_family_and_lack_it() -> None:
    found: dict[str, set[bool]] = {}
    for each in CASES:
        config = load(each).config
        assert isinstance(config, llama.LlamaConfig)
        for name, value in features(config).items():
            found.setdefault(name, set()).add(value)
    assert found == {name: {False, True} for name in found}
