"""What the config.json of a DeepSeek V4 model says, and what it leaves unsaid."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors_torch
from transformers import DeepseekV4Config

from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from tidegate.engine.checkpoint.config import AttentionShape
from tidegate.engine.checkpoint.config_from_hf import config_from_hf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.deepseek_v4 import (
    DeepSeekV4Config,
    IndexerSizes,
    RoutedExperts,
    Streams,
)
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.rope import Rope, YarnScaling
from tidegate.engine.checkpoint.weights import load_weights

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
# As published folders write it: ratios for kinds of layers, one more for a layer that predicts
# further tokens; scaling for compressed layers; a count of layers that look experts up.
PUBLISHED: dict[str, Any] = {
    "num_hidden_layers": 5,
    "compress_ratios": [0, 128, 4, 128, 4, 0],
    "num_hash_layers": 2,
    "qk_rope_head_dim": 64,
    "rope_theta": 10_000,
    "compress_rope_theta": 160_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65_536,
    },
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
EXPECTED = DeepSeekV4Config(
    name="m",
    vocab_size=129_280,
    hidden_size=4096,
    layer_count=5,
    attention=AttentionShape(head_count=64, kv_head_count=1, key_size=512, value_size=512),
    norm_eps=1e-6,
    window=128,
    layer_is_window=(True, False, False, False, False),
    layer_kinds=("window", "hca", "csa", "hca", "csa"),
    layer_has_table=(True, True, False, False, False),
    csa_ratio=4,
    hca_ratio=128,
    query_rank=1024,
    output_group_count=8,
    output_rank=1024,
    indexer=IndexerSizes(head_count=64, head_size=128, entry_count_max=512),
    experts=RoutedExperts(
        count=256, per_token=6, width=2048, scoring="sqrtsoftplus", factor=1.5, limit=10.0
    ),
    streams=Streams(count=4, round_count=20, eps=1e-6),
    rope=Rope(
        theta=160_000.0,
        size=64,
        scaling=YarnScaling(
            factor=16.0,
            original_context=65_536,
            fast_turns=32.0,
            slow_turns=1.0,
            attention_factor=1.0,
            truncate=True,
        ),
    ),
    rope_window=Rope(theta=10_000.0, size=64),
    tie_embeddings=False,
    context=1_048_576,
    bos_id=0,
    eos_ids=(1,),
)


def read(folder: Path, **fields: Any) -> DeepSeekV4Config:
    content = {"architectures": ["DeepseekV4ForCausalLM"]} | fields
    (folder / "config.json").write_text(json.dumps(content))
    config = config_from_hf(folder, "m")
    assert isinstance(config, DeepSeekV4Config)
    return config


def test_a_published_file_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, **PUBLISHED) == EXPECTED


def test_the_file_that_transformers_makes_of_a_published_one_says_the_same(
    tmp_path: Path,
) -> None:
    without_weights = {key: PUBLISHED[key] for key in PUBLISHED if key != "quantization_config"}
    rewritten: Any = DeepseekV4Config(**without_weights)  # Its own types are partial.
    rewritten.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert read(tmp_path, **fields) == EXPECTED


def test_an_empty_file_describes_the_model_of_43_layers(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.layer_count == 43
    assert config.layer_has_table == (True,) * 3 + (False,) * 40
    assert config.rope == Rope(theta=160_000.0, size=64)
    default = DeepseekV4Config()
    kinds = {"csa": CSA, "hca": HCA}
    assert [kinds[kind] for kind in config.layer_kinds] == default.layer_types


def test_older_names_of_the_ratios_count_more(tmp_path: Path) -> None:
    config = read(tmp_path, compress_rates={CSA: 4, HCA: 64}, compress_rate_csa=8)
    assert (config.csa_ratio, config.hca_ratio) == (8, 64)
    config = read(tmp_path, compress_rate_hca=32)
    assert (config.csa_ratio, config.hca_ratio) == (4, 32)


def test_what_a_row_reads_at_most_is_a_window_and_some_of_the_entries(tmp_path: Path) -> None:
    config = read(tmp_path, **PUBLISHED)
    context = 1_048_576
    assert [config.read_numbers(layer) for layer in range(3)] == [
        128 * 512,
        128 * 512 + context // 128 * 512,
        128 * 512 + context // 4 * 128 + 512 * 512,
    ]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"norm_topk_prob": False}, "norm_topk_prob is false"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"scoring_func": "relu"}, "scoring_func is relu: supported are sqrtsoftplus"),
        ({"layer_types": ["full_attention"]}, "layer_types has full_attention"),
        ({"layer_types": [CSA]}, "layer_types has 1 entries: must have one for each of the 43"),
        ({"compress_ratios": [16]}, "compress_ratios has 16: supported are 0, 4, 128"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types has dense"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types has 1 entries"),
        ({"compress_rate_hca": 0}, "hca_ratio is 0: must be from 1 to 4096"),
        ({"o_groups": 3}, "output_group_count is 3: must divide"),
        ({"index_head_dim": 32}, "rope size is 64: must be at most 32"),
        ({"sliding_window": 0}, "window is 0: must be from 1"),
        ({"num_experts_per_tok": 300}, "experts per token is 300: must be from 1 to 256"),
        ({"index_topk": 0}, "index_topk is 0"),
        ({"hc_mult": 0}, "hc_mult is 0"),
    ],
)
def test_what_is_not_supported_or_impossible_is_named(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **fields)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert named in str(caught.value)


def renamed(folder: Path, *prefixes: tuple[str, str], extra: dict[str, torch.Tensor]) -> None:
    """Write the folder's only weight file again, with other beginnings of names."""
    path = folder / "model.safetensors"
    # The ignores: safetensors leaves a parameter of its own open.
    tensors = safetensors_torch.load_file(path)  # pyright: ignore[reportUnknownMemberType]
    for old, new in prefixes:
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in tensors.items()
        }
    safetensors_torch.save_file(  # pyright: ignore[reportUnknownMemberType]
        tensors | extra, path
    )


def test_published_names_are_those_without_a_prefix_and_further_layers_are_left_out(
    tmp_path: Path,
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v4", tie_word_embeddings=False)
    checkpoint = open_checkpoint(str(folder))
    before = load_weights(checkpoint, torch.float32)
    renamed(
        folder,
        ("model.hc_head.hc_", "hc_head_"),
        ("model.embed_tokens.", "embed."),
        ("model.", ""),
        extra={"mtp.0.attn.wkv.weight": torch.zeros(3)},
    )
    after = load_weights(open_checkpoint(str(folder)), torch.float32)
    assert before.keys() == after.keys() == checkpoint.config.weight_shapes().keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.uint8, "U8")],
)
def test_weights_in_fp8_and_fp4_are_refused(
    tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v4")
    name = "model.layers.0.attn.wkv.weight"
    renamed(
        folder,
        extra={
            name: torch.zeros(32, 64).to(dtype),
            "model.layers.0.attn.wkv.scale": torch.ones(1, 1),
        },
    )
    with pytest.raises(CheckpointError) as caught:
        load_weights(open_checkpoint(str(folder)), torch.float32)
    assert f"tensor {name} is {kind}: must be F32, F16 or BF16" in str(caught.value)
    assert "FP4 and FP8 are read only as GPT-OSS and MiMo-V2 are published" in str(caught.value)
