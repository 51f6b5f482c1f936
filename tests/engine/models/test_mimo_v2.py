"""MiMo-V2-Flash through the checks of families: sinks, key heads by kind of layer, routing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import MiMoV2FlashConfig

from fakes.family_checks import CHECKS, check_bfloat16
from fakes.tiny_family import FamilyModels, TinyCase, load
from tidegate.engine.checkpoint.families.mimo_v2 import (
    ROUTER,
    ROUTER_BIAS,
    MimoV2Experts,
)
from tidegate.engine.models.linear import Place
from tidegate.engine.models.mimo_v2 import RoutedExperts

KINDS = {"w": "sliding_attention", "f": "full_attention"}
MLPS = {"d": "dense", "e": "sparse"}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,  # 0.334 of it turn: 8.
    "v_head_dim": 16,
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}
ROPES: dict[str, Any] = {
    "sliding_attention": {
        "rope_type": "default",
        "rope_theta": 50.0,
        "partial_rotary_factor": 0.5,
    },
    "full_attention": {"rope_type": "default", "rope_theta": 900.0},
}
GROUPS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.5,
}


def case(
    page_tokens: int, name: str, layers: str, mlps: str, window: int, **fields: Any
) -> TinyCase:
    """`layers` has a letter of `KINDS` for each layer, `mlps` one of `MLPS`."""
    sizes: dict[str, Any] = SIZES | {
        "num_hidden_layers": len(layers),
        "layer_types": [KINDS[letter] for letter in layers],
        "mlp_layer_types": [MLPS[letter] for letter in mlps],
        "sliding_window": window,
    }
    return TinyCase(name, lambda: MiMoV2FlashConfig(**(sizes | fields)), page_tokens)


CASES = [
    case(4, "as published: a window of pages and one", "fwwf", "deee", 9),
    case(8, "groups of experts, a window smaller than a page", "fwf", "ede", 5, **GROUPS),
    case(
        16,
        "ropes otherwise, biases, a window that is no multiple",
        "wf",
        "ed",
        23,
        rope_parameters=ROPES,
        attention_bias=True,
        num_key_value_heads=2,
        attention_value_scale=None,
    ),
    case(1, "pages of one token, all experts", "wfw", "dee", 4, num_experts_per_tok=6),
    case(4, "window layers only, tied", "ww", "de", 6, tie_word_embeddings=True),
    case(4, "full layers only, no experts", "ff", "dd", 8),
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


def routed(scores: list[float], bias: list[float], **changes: Any) -> list[float]:
    """What one token with these router's products gets of each expert.

    The token is a unit vector, and each expert gives back a vector that names it.
    """
    count = len(scores)
    plain: dict[str, Any] = {
        "count": count,
        "per_token": 1,
        "width": 1,
        "group_count": 1,
        "groups_per_token": 1,
        "normalises_weights": False,
        "weight_scale": 1.0,
    }
    sizes = MimoV2Experts(**(plain | changes))
    token = torch.zeros(1, count)
    token[0, 0] = 1.0
    # silu(gate) * up is 1 for this token, whatever the expert.
    gate, up = torch.zeros(1, count), torch.zeros(1, count)
    gate[0, 0] = 1.0
    up[0, 0] = 1.0 / torch.nn.functional.silu(torch.tensor(1.0))
    router = torch.zeros(count, count)
    router[:, 0] = torch.tensor(scores)
    weights = {ROUTER: router, ROUTER_BIAS: torch.tensor(bias)}
    for expert in range(count):
        down = torch.zeros(count, 1)
        down[expert] = 1.0
        name = f"mlp.experts.{expert}"
        weights[f"{name}.gate_proj.weight"] = gate
        weights[f"{name}.up_proj.weight"] = up
        weights[f"{name}.down_proj.weight"] = down
    place = Place(torch.device("cpu"), torch.float32)
    shares = RoutedExperts(sizes, weights.__getitem__, place)(token)[0]
    return [round(float(share), 4) for share in shares]


def test_the_bias_chooses_experts_and_does_not_weigh_them() -> None:
    # Sigmoids: 0.7311, 0.5, 0.8808, 0.2689.
    scores = [1.0, 0.0, 2.0, -1.0]
    assert routed(scores, [0.0] * 4) == [0, 0, 0.8808, 0]
    assert routed(scores, [0.0, 0.0, 0.0, 1.0]) == [0, 0, 0, 0.2689]
    assert routed(scores, [0.0] * 4, per_token=2) == [0.7311, 0, 0.8808, 0]
    shares = routed(scores, [0.0] * 4, per_token=2, normalises_weights=True, weight_scale=2.0)
    assert shares == pytest.approx([2 * 0.4536, 0, 2 * 0.5464, 0], abs=2e-4)


def test_experts_of_the_groups_with_the_highest_pairs_are_chosen() -> None:
    # The best expert of all stands in the weaker group.
    scores, bias = [3.0, -3.0, 1.0, 1.0], [0.0] * 4
    groups = {"group_count": 2, "groups_per_token": 1}
    assert routed(scores, bias)[0] == 0.9526
    assert routed(scores, bias, per_token=2, **groups) == [0, 0, 0.7311, 0.7311]
    assert routed(scores, [0.0, 1.0, 0.0, 0.0], per_token=2, **groups) == [
        0.9526,
        0.0474,
        0,
        0,
    ]
