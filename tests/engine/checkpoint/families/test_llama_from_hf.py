"""What each architecture of Llama's shape leaves unsaid, and its own fields."""

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.engine.checkpoint.config_from_hf import config_from_hf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.llama import LlamaConfig

# What every published file says.
FIELDS: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}


def read(folder: Path, architecture: str, *absent: str, **fields: Any) -> LlamaConfig:
    content = {"architectures": [architecture]} | FIELDS | fields
    for field in absent:
        del content[field]
    (folder / "config.json").write_text(json.dumps(content))
    config = config_from_hf(folder, "m")
    assert isinstance(config, LlamaConfig)
    return config


def biases(config: LlamaConfig) -> tuple[bool, bool, bool]:
    return config.has_query_key_value_bias, config.has_output_bias, config.has_mlp_bias


@pytest.mark.parametrize(
    ("architecture", "kv_heads", "head_size", "theta", "is_tied"),
    [
        ("LlamaForCausalLM", 32, 8, 1e4, False),
        ("MistralForCausalLM", 8, 8, 1e4, False),
        ("Qwen2ForCausalLM", 32, 8, 1e4, False),
        ("Qwen3ForCausalLM", 32, 128, 1e4, False),
        ("SmolLM3ForCausalLM", 4, 8, 2e6, True),
    ],
)
def test_absent_fields_have_the_architectures_own_values(
    tmp_path: Path,
    architecture: str,
    kv_heads: int,
    head_size: int,
    theta: float,
    is_tied: bool,
) -> None:
    config = read(tmp_path, architecture, "num_key_value_heads")
    shape = config.attention
    assert (shape.kv_head_count, shape.key_size, shape.value_size) == (
        kv_heads,
        head_size,
        head_size,
    )
    assert (config.rope.theta, config.rope.scaling) == (theta, None)
    assert (config.tie_embeddings, config.norm_eps) == (is_tied, 1e-6)
    assert config.has_query_key_norm == (architecture == "Qwen3ForCausalLM")
    assert biases(config) == (architecture == "Qwen2ForCausalLM", False, False)
    assert config.has_window_layers == (architecture == "MistralForCausalLM")


def test_all_layers_of_mistral_have_the_window_or_none_has(tmp_path: Path) -> None:
    name = "MistralForCausalLM"
    default = read(tmp_path, name)
    assert (default.window, default.layer_is_window) == (4096, (True,) * 6)
    assert read(tmp_path, name, sliding_window=7).window == 7
    none = read(tmp_path, name, sliding_window=None)
    assert (none.window, none.layer_is_window) == (None, (False,) * 6)


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_layers_of_qwen_have_a_window_only_if_it_is_used(tmp_path: Path, name: str) -> None:
    unused = read(tmp_path, name, sliding_window=100, max_window_layers=2)
    assert (unused.window, unused.has_window_layers) == (None, False)
    used = {"use_sliding_window": True, "sliding_window": 100}
    # The first layers are full, the others have the window.
    later = read(tmp_path, name, max_window_layers=4, **used)
    assert (later.window, later.layer_is_window) == (100, (False,) * 4 + (True,) * 2)
    # By default more of them are full than there are.
    assert read(tmp_path, name, **used).window is None
    types = ["sliding_attention", "full_attention"] * 3
    listed = read(tmp_path, name, layer_types=types, max_window_layers=6, **used)
    assert listed.layer_is_window == (True, False) * 3
    with pytest.raises(CheckpointError, match="window is None: must be from 1"):
        read(tmp_path, name, layer_types=types)


def test_biases_are_where_the_architecture_has_them(tmp_path: Path) -> None:
    assert biases(read(tmp_path, "LlamaForCausalLM", attention_bias=True)) == (
        (True, True, False)
    )
    assert biases(read(tmp_path, "LlamaForCausalLM", mlp_bias=True)) == (False, False, True)
    assert biases(read(tmp_path, "Qwen3ForCausalLM", attention_bias=True)) == (
        (True, True, False)
    )
    for name in ("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        with pytest.raises(CheckpointError, match="mlp_bias is true"):
            read(tmp_path, name, mlp_bias=True)
    with pytest.raises(CheckpointError, match="attention_bias is true"):
        read(tmp_path, "MistralForCausalLM", attention_bias=True)


def test_smollm3_says_which_layers_rotate(tmp_path: Path) -> None:
    name = "SmolLM3ForCausalLM"
    default = read(tmp_path, name)
    assert default.layer_has_rope == (True, True, True, False, True, True)
    assert not default.has_window_layers
    interval = read(tmp_path, name, no_rope_layer_interval=2)
    assert interval.layer_has_rope == (True, False) * 3
    # The list may be for a deeper model.
    listed = read(tmp_path, name, no_rope_layers=[0, 1, 1, 1, 0, 1, 1, 1])
    assert listed.layer_has_rope == (False, True, True, True, False, True)
    with pytest.raises(CheckpointError, match="no_rope_layers has 2 entries"):
        read(tmp_path, name, no_rope_layers=[0, 1])
    with pytest.raises(CheckpointError, match="no_rope_layer_interval is 0"):
        read(tmp_path, name, no_rope_layer_interval=0)


def test_layers_of_smollm3_that_do_not_rotate_may_have_a_window(tmp_path: Path) -> None:
    name = "SmolLM3ForCausalLM"
    used = read(tmp_path, name, use_sliding_window=True, sliding_window=50)
    assert used.window == 50
    assert used.layer_is_window == (False, False, False, True, False, False)
    types = ["full_attention"] * 5 + ["sliding_attention"]
    listed = read(tmp_path, name, sliding_window=50, layer_types=types)
    assert listed.layer_is_window == (False,) * 5 + (True,)
    assert read(tmp_path, name, sliding_window=50).window is None
