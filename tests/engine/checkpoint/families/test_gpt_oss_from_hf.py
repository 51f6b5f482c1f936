"""What the config.json of a GPT-OSS model says, and what it leaves unsaid."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tidegate.engine.checkpoint.config import AttentionShape
from tidegate.engine.checkpoint.config_from_hf import config_from_hf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gpt_oss import GptOssConfig, GptOssExperts
from tidegate.engine.checkpoint.rope import LinearScaling, Rope, YarnScaling

FIELDS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 288,
    "intermediate_size": 144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 131_072,
    "eos_token_id": 2,
}
# The fields of the published 20B model that are not sizes of its weights.
PUBLISHED: dict[str, Any] = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
EXPECTED = GptOssConfig(
    name="m",
    vocab_size=1000,
    hidden_size=288,
    layer_count=4,
    attention=AttentionShape(head_count=16, kv_head_count=8, key_size=64, value_size=64),
    norm_eps=1e-5,
    rope=Rope(
        theta=150_000.0,
        size=64,
        scaling=YarnScaling(
            factor=32.0,
            original_context=4096,
            fast_turns=32.0,
            slow_turns=1.0,
            attention_factor=0.1 * math.log(32) + 1,
            truncate=False,
        ),
    ),
    experts=GptOssExperts(
        count=128, per_token=4, width=144, swiglu_alpha=1.702, swiglu_limit=7.0
    ),
    has_attention_bias=True,
    window=128,
    layer_is_window=(True, False, True, False),
    tie_embeddings=False,
    context=131_072,
    bos_id=None,
    eos_ids=(2,),
)


def read(folder: Path, **fields: Any) -> GptOssConfig:
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))
    config = config_from_hf(folder, "m")
    assert isinstance(config, GptOssConfig)
    return config


def test_a_published_file_and_one_that_leaves_all_to_defaults_are_alike(tmp_path: Path) -> None:
    assert read(tmp_path, **PUBLISHED) == EXPECTED
    assert read(tmp_path) == EXPECTED


def test_newer_files_have_the_rotation_in_one_field(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    config = read(tmp_path, rope_parameters=rope)
    assert config.rope == Rope(theta=1e4, size=64, scaling=LinearScaling(2.0))


def test_layers_of_one_kind_need_one_pool_only(tmp_path: Path) -> None:
    config = read(tmp_path, layer_types=["full_attention"] * 4)
    assert (config.window, config.has_window_layers) == (None, False)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is awq: only mxfp4"),
        ({"quantization_config": {}}, "quant_method is None: only mxfp4"),
        ({"num_experts_per_tok": 200}, "experts per token is 200: must be from 1 to 128"),
        ({"num_local_experts": 0}, "expert count is 0"),
        ({"intermediate_size": 0}, "expert width is 0"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0"),
        ({"sliding_window": None}, "window is None: must be from 1"),
        ({"layer_types": ["full_attention"]}, "layer_is_window is 1 entries"),
        ({"num_key_value_heads": 5}, "kv_head_count, which is 5"),
    ],
)
def test_what_is_not_supported_or_impossible_is_named(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **fields)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert named in str(caught.value)
