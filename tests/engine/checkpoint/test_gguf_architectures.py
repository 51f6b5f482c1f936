"""Each architecture of GGUF files, against the folder it was made of, and transformers."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from oracle.make_tiny_checkpoint import VOCAB_SIZE, make_tiny_checkpoint, randomise
from oracle.make_tiny_gguf import make_tiny_gguf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gemma4 import Gemma4Config as OurGemma4Config
from tidegate.engine.checkpoint.families.llama import LlamaConfig as OurConfig
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.rope import FactorScaling
from tidegate.engine.checkpoint.weights import load_weights
from tidegate.engine.models.rotary import frequencies

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama_biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    # Of 128 numbers a head: transformers takes no other size from a file.
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 128, "tie_word_embeddings": True}),
    # The last but one layer knows no positions.
    "smollm3": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {"num_hidden_layers": 5, "pad_token_id": 0, "tie_word_embeddings": True},
    ),
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "sliding_window": 8,
    "head_dim": 16,
    "global_head_dim": 32,
}
GEMMA4_CASES: dict[str, dict[str, Any]] = {
    # As the small published models.
    "sharing": GEMMA4
    | {
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB_SIZE + 7,
        "final_logit_softcapping": 30.0,
    },
    # As the large dense one.
    "values_from_keys": GEMMA4
    | {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": False,
    },
}


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """A folder, and a GGUF file of the same model."""
    make_tiny_checkpoint(folder, "llama")
    config_class, model_class, fields = CASES[name]
    return save(folder, model_class(config_class(**SIZES | fields)))


def make_gemma4(folder: Path, name: str) -> tuple[Path, Path]:
    make_tiny_checkpoint(folder, "gemma4")
    return save(folder, Gemma4ForCausalLM(Gemma4TextConfig(**SIZES | GEMMA4_CASES[name])))


def save(folder: Path, model: Any, **fields: Any) -> tuple[Path, Path]:
    randomise(model, 0)
    model.save_pretrained(folder)
    return folder, make_tiny_gguf(folder / "tiny.gguf", folder, **fields)


def our_config(path: Path) -> OurConfig:
    config = open_checkpoint(str(path)).config
    assert isinstance(config, OurConfig)
    return msgspec.structs.replace(config, name="m")


@pytest.mark.parametrize("name", CASES)
def test_a_folder_and_its_file_give_the_same_configuration_and_weights(
    tmp_path: Path, name: str
) -> None:
    folder, path = make(tmp_path, name)
    ours, theirs = our_config(path), our_config(folder)
    if name == "llama3":
        # The file has a factor for each pair, instead of what they are made of.
        assert isinstance(ours.rope.scaling, FactorScaling)
        torch.testing.assert_close(
            frequencies(ours.rope), frequencies(theirs.rope), rtol=1e-6, atol=0
        )
        ours = msgspec.structs.replace(ours, rope=theirs.rope)
    assert ours == theirs
    weights, expected = (
        load_weights(open_checkpoint(str(each)), torch.float32) for each in (path, folder)
    )
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        assert torch.equal(weight, expected[key]), key


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_that_transformers_reads_from_the_file(
    tmp_path: Path, name: str
) -> None:
    _, path = make(tmp_path, name)
    auto_model: Any = AutoModelForCausalLM
    reference = auto_model.from_pretrained(path.parent, gguf_file=path.name)
    expected: dict[str, torch.Tensor] = reference.state_dict()
    for key, weight in load_weights(open_checkpoint(str(path)), torch.float32).items():
        assert torch.equal(weight, expected[key].float()), key


@pytest.mark.parametrize("name", GEMMA4_CASES)
def test_a_folder_of_gemma_4_and_its_file_give_the_same_model(
    tmp_path: Path, name: str
) -> None:
    checkpoints = [open_checkpoint(str(path)) for path in make_gemma4(tmp_path, name)]
    theirs, ours = (
        msgspec.structs.replace(checkpoint.config, name="m") for checkpoint in checkpoints
    )
    assert isinstance(ours, OurGemma4Config)
    assert ours == theirs
    assert (ours.rope.turning_pairs, ours.rope.size) == (4, 32)
    expected, weights = (load_weights(checkpoint, torch.float32) for checkpoint in checkpoints)
    assert list(weights) == list(expected)
    for key, weight in weights.items():
        assert torch.equal(weight, expected[key]), key


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("expert_count", 4, "read from folders only"),
        ("attention.value_length", 16, "must be the head size"),
        ("rope.dimension_count_swa", 8, "must be the head size"),
        ("attention.sliding_window_pattern", [True, False], "one entry for each of the 5"),
        ("attention.head_count_kv", [2, 2, 2], "must have 5 entries"),
        ("feed_forward_length", [96, 96, 96, 192, 96], "or twice as much for those that share"),
    ],
)
def test_what_a_file_of_gemma_4_cannot_have_is_named(
    tmp_path: Path, field: str, value: Any, text: str
) -> None:
    make_tiny_checkpoint(tmp_path, "gemma4")
    model = Gemma4ForCausalLM(Gemma4TextConfig(**SIZES | GEMMA4_CASES["sharing"]))
    _, path = save(tmp_path, model, fields={f"gemma4.{field}": value})
    with pytest.raises(CheckpointError, match=rf"field gemma4\.{field} is .*{text}"):
        _ = open_checkpoint(str(path)).config
