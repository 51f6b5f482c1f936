"""Gemma 4's configuration: from both ways to write config.json down, and what is refused."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tidegate.engine.checkpoint.config import AttentionShape
from tidegate.engine.checkpoint.config_from_hf import config_from_hf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gemma4 import (
    ExpertSizes,
    Gemma4Config,
    PerLayerInputs,
)
from tidegate.engine.checkpoint.rope import LinearScaling, Rope
from tidegate.engine.models.layouts import layout_for

W, F = "sliding_attention", "full_attention"
ROPES = {
    F: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    W: {"rope_theta": 1e4, "rope_type": "default"},
}
# The sizes of published models: a small one, one with experts, and a large dense one.
SMALL: dict[str, Any] = {
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 35,
    "layer_types": [*[W] * 4, F] * 7,
    "num_kv_shared_layers": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": False,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": 30.0,
    "rope_parameters": ROPES,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
ROUTED = SMALL | {
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "use_double_wide_mlp": False,
    "num_hidden_layers": 30,
    "layer_types": [*[W] * 5, F] * 5,
    "num_kv_shared_layers": 0,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "use_bidirectional_attention": "vision",
}
LARGE = ROUTED | {
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 60,
    "layer_types": [*[W] * 5, F] * 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "enable_moe_block": False,
}


def config_of(
    folder: Path, text: dict[str, Any], outside: dict[str, Any] | None = None
) -> Gemma4Config:
    """The configuration of a text model, or of one with more around it."""
    content = {"architectures": ["Gemma4ForCausalLM"]} | text
    if outside is not None:
        content = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
        content |= outside
    (folder / "config.json").write_text(json.dumps(content))
    config = config_from_hf(folder, "m")
    assert isinstance(config, Gemma4Config)
    return config


def heads(head_count: int, kv_head_count: int, size: int) -> AttentionShape:
    return AttentionShape(
        head_count=head_count, kv_head_count=kv_head_count, key_size=size, value_size=size
    )


def parameter_count(config: Gemma4Config) -> float:
    """In billions."""
    return sum(prod(shape) for shape in config.weight_shapes().values()) / 1e9


def test_a_small_model_shares_the_keys_of_its_last_owners(tmp_path: Path) -> None:
    config = config_of(tmp_path, SMALL, {"eos_token_id": [1, 106]})
    assert config.eos_ids == (1, 106)
    assert config.attention_of(0) == heads(8, 1, 256)
    assert config.attention_of(4) == heads(8, 1, 512)
    assert config.rope == Rope(theta=1e6, size=512, turning_pairs=64)
    assert config.rope_window == Rope(theta=1e4, size=256)
    assert [config.kv_owner(layer) for layer in (0, 14, 15, 18, 19, 34)] == [
        0,
        14,
        13,
        13,
        14,
        14,
    ]
    assert [config.mlp_width_of(layer) for layer in (14, 15)] == [6144, 12_288]
    assert config.per_layer_inputs == PerLayerInputs(width=256, vocab_size=262_144)
    assert (config.logit_cap, config.experts) == (30.0, None)
    assert parameter_count(config) == pytest.approx(4.65, abs=0.05)
    full, window = layout_for(config, 16, "bfloat16").groups
    assert [{spec.layer for spec in group.tensors} for group in (full, window)] == [
        {4, 9, 14},
        {0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13},
    ]


def test_a_model_with_experts_has_few_key_heads_in_full_layers(tmp_path: Path) -> None:
    config = config_of(tmp_path, ROUTED, {})
    assert config.experts == ExpertSizes(count=128, per_token=8, width=704)
    assert config.mlp_width == 2112 + 8 * 704
    assert config.attention_of(0) == heads(16, 8, 256)
    assert config.attention_of(5) == heads(16, 2, 512)
    assert config.per_layer_inputs is None
    shapes = config.weight_shapes()
    assert "model.layers.0.self_attn.v_proj.weight" in shapes
    assert "model.layers.5.self_attn.v_proj.weight" not in shapes
    assert shapes["model.layers.5.experts.gate_up_proj"] == (128, 1408, 2816)
    assert parameter_count(config) == pytest.approx(25.2, abs=0.1)


def test_a_large_model_is_dense(tmp_path: Path) -> None:
    config = config_of(tmp_path, LARGE)
    assert config.experts is None
    assert config.mlp_width == 21_504
    assert parameter_count(config) == pytest.approx(30.7, abs=0.1)


def test_both_ways_to_write_the_heads_of_full_layers_mean_the_same(tmp_path: Path) -> None:
    by_layer = {str(n): {"head_dim": 512, "num_key_value_heads": 4} for n in range(5, 60, 6)}
    text = LARGE | {"per_layer_config": by_layer}
    del text["global_head_dim"], text["num_global_key_value_heads"]
    assert config_of(tmp_path, text) == config_of(tmp_path, LARGE)


def test_key_heads_of_full_layers_count_only_where_values_come_from_keys(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, ROUTED | {"attention_k_eq_v": False})
    assert config.attention_of(5) == heads(16, 8, 512)
    assert "model.layers.5.self_attn.v_proj.weight" in config.weight_shapes()


def test_what_a_file_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"eos_token_id": 1})
    assert (config.layer_count, config.hidden_size, config.context) == (30, 2304, 131_072)
    assert config.layer_is_window == (*[True] * 5, False) * 5
    assert config.rope == Rope(theta=1e6, size=512, turning_pairs=64)
    assert config.rope_window == Rope(theta=1e4, size=256)
    assert config.logit_cap is None


def test_the_last_layer_has_full_attention_whatever_the_file_says(tmp_path: Path) -> None:
    text = LARGE | {"num_hidden_layers": 3, "layer_types": [F, W, W]}
    assert config_of(tmp_path, text).layer_is_window == (False, True, False)


def test_a_stretched_rotation_of_full_layers(tmp_path: Path) -> None:
    ropes = ROPES | {F: ROPES[F] | {"factor": 8.0}}
    rope = config_of(tmp_path, LARGE | {"rope_parameters": ropes}).rope
    assert rope == Rope(theta=1e6, size=512, turning_pairs=64, scaling=LinearScaling(8.0))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"layer_types": [W, F]},
            "layer_types has 2 entries: must have one for each of the 60",
        ),
        (
            {"layer_types": [*["chunked_attention"] * 59, F]},
            "layer_types has chunked_attention",
        ),
        ({"num_kv_shared_layers": 60}, "kv_sharing_layer_count is 60: must be from 0 to 59"),
        ({"num_kv_shared_layers": 57}, "leaves no layer with full attention"),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention is "all"'),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_activation": "silu"}, 'hidden_activation is "silu"'),
        ({"final_logit_softcapping": 0.0}, "logit_cap is 0.0: must be a positive number"),
        ({"rope_parameters": {W: ROPES[W]}}, "rope_parameters.full_attention is missing"),
        ({"per_layer_config": {"60": {}}}, "per_layer_config has '60'"),
        ({"per_layer_config": {"5": {"head_dim": 128}}}, "rope size of layer 11 is 128"),
        ({"enable_moe_block": True, "num_experts": None}, "num_experts is missing"),
        (
            {"enable_moe_block": True, "top_k_experts": 129},
            "experts per token is 129: must be from 1 to 128",
        ),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9},
            "vocab_size is 9: must be at least",
        ),
        ({"num_global_key_value_heads": 3}, "head_count is 32: must be a multiple"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_would_give_wrong_answers_is_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: ") as caught:
        config_of(tmp_path, LARGE | changes)
    assert text in str(caught.value)


def test_tensors_of_other_parts_are_left_out_and_text_is_renamed(tmp_path: Path) -> None:
    config = config_of(tmp_path, SMALL)
    expected: dict[str, str | None] = {
        "model.language_model.norm.weight": "model.norm.weight",
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
        "model.vision_tower.encoder.layers.0.self_attn.k_proj.linear.weight": None,
        "model.embed_vision.embedding_projection.weight": None,
        "model.audio_tower.output_proj.bias": None,
        "model.embed_audio.embedding_projection.weight": None,
        # The layer reads the keys of layer 14: its own projections are never used.
        "model.language_model.layers.19.self_attn.k_proj.weight": None,
        "model.layers.19.self_attn.v_proj.weight": None,
        "model.layers.19.self_attn.k_norm.weight": None,
        "model.layers.14.self_attn.k_proj.weight": "model.layers.14.self_attn.k_proj.weight",
        "model.layers.19.self_attn.q_proj.weight": "model.layers.19.self_attn.q_proj.weight",
        "model.layers.19.other": "model.layers.19.other",
        "something.else": "something.else",
    }
    assert {name: config.canonical_name(name) for name in expected} == expected
