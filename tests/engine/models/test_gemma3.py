"""Gemma 3 through the checks that every family passes, alone and within a model that sees."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

from fakes.family_checks import CHECKS
from fakes.tiny_family import FamilyModels, TinyCase, load

KINDS = {"w": "sliding_attention", "f": "full_attention"}
LINEAR: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
}


def text_config(pattern: str, window: int, **fields: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(pattern),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": window,
        "layer_types": [KINDS[letter] for letter in pattern],
    }
    return Gemma3TextConfig(**sizes | fields)


def text(page_tokens: int, name: str, pattern: str, window: int, **fields: Any) -> TinyCase:
    return TinyCase(name, lambda: text_config(pattern, window, **fields), page_tokens)


def sees() -> Any:
    """A model whose checkpoint holds parts for images too."""
    vision: Any = SiglipVisionConfig  # Its own types are partial.
    return Gemma3Config(
        text_config=text_config("wf", 6, rope_parameters=LINEAR),
        vision_config=vision(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        ),
        mm_tokens_per_image=4,
    )


CASES = [
    text(8, "a window smaller than a page", "wfw", 5),
    text(4, "a window of some pages", "wwf", 8, num_key_value_heads=2),
    text(4, "a window that is no multiple of a page", "fw", 23, tie_word_embeddings=False),
    text(1, "pages of one token, a scaled rotation", "wf", 6, rope_parameters=LINEAR),
    text(
        4, "a window of the token itself, capped logits", "wf", 1, final_logit_softcapping=3.0
    ),
    text(8, "window layers only", "ww", 11),
    TinyCase("the text part of a model that sees", sees, 4),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_family_is_as_its_layout_says(
    case: TinyCase, check: Callable[[FamilyModels], None]
) -> None:
    check(load(case))
