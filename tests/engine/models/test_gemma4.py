"""Gemma 4 through the checks that every family passes: each kind of layer, dense and routed."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import Gemma4AudioConfig, Gemma4Config, Gemma4TextConfig, Gemma4VisionConfig

from fakes.family_checks import CHECKS, check_bfloat16
from fakes.tiny_family import FamilyModels, TinyCase, load

KINDS = {"w": "sliding_attention", "f": "full_attention"}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 4096,
}
# As the small published models: the last layers own no keys, and each layer has an input.
SMALL: dict[str, Any] = {
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 101,
    "num_key_value_heads": 1,
    "final_logit_softcapping": 3.0,
}
# As the large ones: in full layers, few key heads whose projection gives the values too.
LARGE: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
ROUTED: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
    "final_logit_softcapping": 30.0,
}
ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 900.0,
        "partial_rotary_factor": 0.5,
        "factor": 2.0,
    },
}


def text_fields(pattern: str, window: int, **fields: Any) -> dict[str, Any]:
    layers = {
        "num_hidden_layers": len(pattern),
        "layer_types": [KINDS[letter] for letter in pattern],
        "sliding_window": window,
    }
    return SIZES | layers | fields


def text(page_tokens: int, name: str, pattern: str, window: int, **fields: Any) -> TinyCase:
    whole = text_fields(pattern, window, **fields)
    return TinyCase(name, lambda: Gemma4TextConfig(**whole), page_tokens)


def sees_and_hears() -> Any:
    """A model whose checkpoint holds parts for images and sounds too."""
    return Gemma4Config(
        text_config=Gemma4TextConfig(
            **text_fields("wfwf", 7, **SMALL | {"num_kv_shared_layers": 2})
        ),
        vision_config=Gemma4VisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            position_embedding_size=16,
        ),
        audio_config=Gemma4AudioConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            subsampling_conv_channels=[4, 4],
            output_proj_dims=16,
        ),
    )


CASES = [
    text(4, "plain, a window that is no multiple of a page", "wwf", 6),
    text(8, "values from keys, a window smaller than a page", "wfwf", 5, **LARGE),
    text(4, "shared keys and layers' inputs", "wfwfwwf", 8, **SMALL),
    text(4, "shared keys, values from keys", "wfwf", 9, **LARGE, num_kv_shared_layers=2),
    text(
        16,
        "experts, ropes otherwise, a window larger than a page",
        "wfwf",
        23,
        **LARGE,
        **ROUTED,
        rope_parameters=ROPES,
    ),
    text(
        1,
        "experts, pages of one token, a head of its own",
        "wwf",
        3,
        **ROUTED,
        tie_word_embeddings=False,
    ),
    text(4, "full layers alone", "ff", 6, **LARGE, num_kv_shared_layers=1),
    TinyCase("the text part of a model that sees and hears", sees_and_hears, 4),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_family_is_as_its_layout_says(
    case: TinyCase, check: Callable[[FamilyModels], None]
) -> None:
    check(load(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_stays_near_float32(case: TinyCase) -> None:
    check_bfloat16(load(case, "bfloat16"))


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gpu_stays_near_float32_in_bfloat16(case: TinyCase) -> None:
    check_bfloat16(load(case, "bfloat16", "cuda"))
