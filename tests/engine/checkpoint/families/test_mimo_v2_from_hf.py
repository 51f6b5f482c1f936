"""What the config.json of a MiMo-V2-Flash model says, in either way to write it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.engine.checkpoint.config import AttentionShape
from tidegate.engine.checkpoint.config_from_hf import config_from_hf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.mimo_v2 import MimoV2Config, MimoV2Experts
from tidegate.engine.checkpoint.rope import LinearScaling, Rope

# What both ways have in common.
FIELDS: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 262_144,
    "eos_token_id": 2,
}
PUBLISHED: dict[str, Any] = {
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_value_scale": 0.707,
    "head_dim": 192,
    "hidden_act": "silu",
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "layernorm_epsilon": 1e-5,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0, 1, 1, 1],
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_theta": 5_000_000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 16,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10_000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
REWRITTEN: dict[str, Any] = {
    "layer_types": [
        *("full_attention", "sliding_attention"),
        *("sliding_attention", "full_attention"),
    ],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.334,
            "rope_theta": 5_000_000.0,
            "rope_type": "default",
        },
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "routed_scaling_factor": 1.0,
    "sliding_window": 129,
}


def heads(kv_head_count: int) -> AttentionShape:
    return AttentionShape(
        head_count=16, kv_head_count=kv_head_count, key_size=192, value_size=128
    )


EXPECTED = MimoV2Config(
    name="m",
    vocab_size=1000,
    hidden_size=64,
    layer_count=4,
    norm_eps=1e-5,
    window=129,
    layer_is_window=(False, True, True, False),
    tie_embeddings=False,
    context=262_144,
    bos_id=None,
    eos_ids=(2,),
    attention=(heads(4), heads(8), heads(8), heads(4)),
    has_attention_bias=False,
    value_scale=0.707,
    rope=Rope(theta=5e6, size=64),
    rope_window=Rope(theta=1e4, size=64),
    intermediate_size=96,
    layer_has_experts=(False, True, True, True),
    experts=MimoV2Experts(
        count=256,
        per_token=8,
        width=2048,
        group_count=1,
        groups_per_token=1,
        normalises_weights=True,
        weight_scale=1.0,
    ),
)


def read(folder: Path, **fields: Any) -> MimoV2Config:
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))
    config = config_from_hf(folder, "m")
    assert isinstance(config, MimoV2Config)
    return config


def test_published_files_and_those_of_transformers_are_alike(tmp_path: Path) -> None:
    assert read(tmp_path, **PUBLISHED) == EXPECTED
    assert read(tmp_path, **REWRITTEN) == EXPECTED


def test_a_file_that_leaves_all_to_defaults_has_the_published_models_layers(
    tmp_path: Path,
) -> None:
    config = read(tmp_path, num_hidden_layers=12)
    full = [n for n, is_window in enumerate(config.layer_is_window) if not is_window]
    assert full == [0, 5, 11]
    assert config.layer_has_experts == (False, *[True] * 11)
    assert (config.window, config.value_scale) == (129, 0.707)
    assert (config.rope, config.rope_window) == (EXPECTED.rope, EXPECTED.rope_window)


def test_layers_of_one_kind_need_the_fields_of_that_kind_only(tmp_path: Path) -> None:
    ropes = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}
    config = read(
        tmp_path,
        layer_types=["full_attention"] * 4,
        mlp_layer_types=["dense"] * 4,
        rope_parameters=ropes,
        attention_value_scale=None,
    )
    assert (config.window, config.rope_window, config.experts) == (None, None, None)
    assert config.rope == Rope(theta=7.0, size=192, scaling=LinearScaling(2.0))
    assert config.value_scale == 1.0
    assert config.mlp_width == 96


def test_only_weights_of_the_router_stay_float32(tmp_path: Path) -> None:
    config = read(tmp_path, **PUBLISHED)
    kept = [name for name in config.weight_shapes() if config.is_float32(name)]
    assert kept == [
        f"model.layers.{layer}.mlp.gate.{part}"
        for layer in (1, 2, 3)
        for part in ("weight", "e_score_correction_bias")
    ]


def test_heads_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.canonical_name("model.mtp.layers.0.input_layernorm.weight") is None
    assert config.canonical_name("model.norm.weight") == "model.norm.weight"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"quantization_config": {"quant_method": "awq"}}, 'quant_method is "awq": only "fp8"'),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is null"),
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
        ({"topk_method": "greedy"}, 'topk_method is "greedy"'),
        ({"n_shared_experts": 1}, "n_shared_experts is 1"),
        ({"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias is false"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is true"),
        ({"hybrid_layer_pattern": [0, 2, 1, 1]}, "hybrid_layer_pattern has 2"),
        ({"hybrid_layer_pattern": [0]}, "layer_is_window is 1 entries"),
        ({"moe_layer_freq": [0, 1]}, "layer_has_experts is 2 entries"),
        ({"mlp_layer_types": ["dense", "thick"]}, "mlp_layer_types has thick"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has linear_attention"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.sliding_attention"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0"),
        ({"partial_rotary_factor": 0.34}, "rope size is 65: must be even"),
        ({"head_dim": 0}, "key_size is 0"),
        ({"attention_value_scale": 0.0}, "value_scale is 0.0"),
        ({"n_group": 3}, "expert count is 256: must be a multiple of the 3 groups"),
        ({"n_group": 256}, "with two experts in each at least"),
        ({"n_group": 4, "topk_group": 5}, "expert groups per token is 5"),
        ({"num_experts_per_tok": 257}, "experts per token is 257: must be from 1 to 256"),
        (
            {"n_group": 64, "num_experts_per_tok": 8},
            "experts per token is 8: must be from 1 to",
        ),
        ({"swa_num_key_value_heads": 5}, "kv_head_count, which is 5"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
    ],
)
def test_what_is_not_supported_or_impossible_is_named(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **fields)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert named in str(caught.value)
