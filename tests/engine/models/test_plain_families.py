"""Llama and Gemma 3 through the checks that every family passes."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from fakes.family_checks import CHECKS
from fakes.tiny_family import FamilyModels, TinyCase, load

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "eos_token_id": 1,
}


def llama(page_tokens: int, name: str, **fields: Any) -> TinyCase:
    sizes: dict[str, Any] = SIZES | {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return TinyCase(name, lambda: LlamaConfig(**sizes | fields), page_tokens)


def gemma3(page_tokens: int, name: str, window: int, pattern: str, **fields: Any) -> TinyCase:
    kinds = {"w": "sliding_attention", "f": "full_attention"}
    sizes: dict[str, Any] = SIZES | {
        "num_hidden_layers": len(pattern),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": window,
        "layer_types": [kinds[letter] for letter in pattern],
    }
    return TinyCase(name, lambda: Gemma3TextConfig(**sizes | fields), page_tokens)


CASES = [
    llama(4, "llama, two heads share a key head"),
    llama(1, "llama, pages of one token, a key head for each head", num_key_value_heads=4),
    llama(
        16,
        "llama, one key head, a head of its own",
        num_key_value_heads=1,
        tie_word_embeddings=False,
    ),
    gemma3(8, "gemma3, a window smaller than a page", 5, "wfw"),
    gemma3(4, "gemma3, a window of some pages", 8, "wwf", num_key_value_heads=2),
    gemma3(4, "gemma3, a window that is no multiple of a page", 23, "fw"),
    gemma3(1, "gemma3, pages of one token", 6, "wf"),
    gemma3(4, "gemma3, a window of the token itself", 1, "wf"),
    gemma3(8, "gemma3, window layers only", 11, "ww"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_family_is_as_its_layout_says(
    case: TinyCase, check: Callable[[FamilyModels], None]
) -> None:
    check(load(case))
