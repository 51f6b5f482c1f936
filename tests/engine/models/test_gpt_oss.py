"""GPT-OSS through the checks of families: windows of many sizes, sinks, experts, YaRN."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import GptOssConfig

from fakes.family_checks import CHECKS
from fakes.tiny_family import FamilyModels, TinyCase, load

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}


def case(page_tokens: int, name: str, window: int, **fields: Any) -> TinyCase:
    sizes: dict[str, Any] = SIZES | {"sliding_window": window} | fields
    return TinyCase(name, lambda: GptOssConfig(**sizes), page_tokens)


CASES = [
    case(4, "a window of some pages, rotation by default", 8, num_hidden_layers=4),
    case(8, "a window smaller than a page", 5, rope_parameters=YARN),
    case(
        4,
        "a window that is no multiple, tied, one key head",
        23,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    case(1, "pages of one token, a low limit", 6, swiglu_limit=0.3, swiglu_alpha=1.2),
    case(
        4,
        "window layers only, all experts, no biases of attention",
        11,
        layer_types=["sliding_attention"] * 2,
        num_experts_per_tok=6,
        attention_bias=False,
    ),
    case(
        8,
        "full layers only, one expert a token",
        8,
        layer_types=["full_attention"] * 2,
        num_experts_per_tok=1,
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_family_is_as_its_layout_says(
    case: TinyCase, check: Callable[[FamilyModels], None]
) -> None:
    check(load(case))
