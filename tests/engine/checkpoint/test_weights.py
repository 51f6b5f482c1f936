"""Weights come out under the same names and conventions from either kind of file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors import torch as safetensors_torch
from transformers import AutoModelForCausalLM

from oracle.make_tiny_checkpoint import TinyFamily, make_tiny_checkpoint
from oracle.make_tiny_gguf import make_tiny_gguf
from tidegate.engine.checkpoint import weights as weights_module
from tidegate.engine.checkpoint.config import FAMILIES
from tidegate.engine.checkpoint.config_from_gguf import ARCHITECTURES
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.tensor_names import weight_bytes
from tidegate.engine.checkpoint.weights import load_weights

Weights = dict[str, torch.Tensor]


def load(path: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(open_checkpoint(str(path)), dtype)


def stored(folder: Path) -> Weights:
    """The tensors as transformers holds them after loading the folder."""
    model = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)
    return dict(model.state_dict())


def resave(folder: Path, change: Callable[[Weights], None]) -> None:
    """Change the tensors in the folder's only weight file."""
    tensors = {name: tensor.clone() for name, tensor in stored(folder).items()}
    if json.loads((folder / "config.json").read_text())["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    change(tensors)
    # The ignore: safetensors leaves a parameter of its own open.
    safetensors_torch.save_file(  # pyright: ignore[reportUnknownMemberType]
        tensors, folder / "model.safetensors"
    )


def assert_equal(left: Weights, right: Weights) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def expected_of(folder: Path, family: TinyFamily, is_tied: bool) -> Weights:
    tensors = stored(folder)
    if is_tied:
        del tensors["lm_head.weight"]
    if family == "mimo_v2":
        return by_published_names(tensors)
    if family == "deepseek_v4":
        return by_names_of_deepseek(tensors)
    if family != "gemma3":
        return tensors
    return {
        name: tensor + 1 if tensor.ndim == 1 else tensor for name, tensor in tensors.items()
    }


def by_published_names(tensors: Weights) -> Weights:
    """Of MiMo-V2, whose experts transformers joins, and whose sinks it calls otherwise."""
    found: Weights = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "sinks":
            found[f"{module}.attention_sink_bias"] = tensor
        elif kind == "down_proj":
            for number, part in enumerate(tensor):
                found[f"{module}.{number}.down_proj.weight"] = part
        elif kind == "gate_up_proj":
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[f"{module}.{number}.gate_proj.weight"] = gate
                found[f"{module}.{number}.up_proj.weight"] = up
        else:
            found[name] = tensor
    return found


# In this order, what transformers calls otherwise than the published folders.
NAMES_OF_DEEPSEEK = (
    ("shared_experts.gate_proj", "shared_experts.w1"),
    ("shared_experts.down_proj", "shared_experts.w2"),
    ("shared_experts.up_proj", "shared_experts.w3"),
    (".compressor.indexer.scorer.weights_proj.", ".indexer.weights_proj."),
    (".compressor.indexer.q_b_proj.", ".indexer.wq_b."),
    (".compressor.indexer.", ".indexer.compressor."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".position_bias", ".ape"),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".q_a_proj.", ".wq_a."),
    (".q_b_proj.", ".wq_b."),
    (".kv_proj.", ".wkv."),
    (".gate_proj.", ".wgate."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".q_a_norm.", ".q_norm."),
    (".sinks", ".attn_sink"),
    (".e_score_correction_bias", ".bias"),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    ("hc_head.hc_", "hc_head_"),
)


# What DeepSeek keeps in the smaller type; whatever scales, gates, routes or mixes is exact.
ROUNDED_OF_DEEPSEEK = (
    *("embed_tokens.weight", "lm_head.weight"),
    *(f".{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")),
)


def by_names_of_deepseek(tensors: Weights) -> Weights:
    found: Weights = {}
    for name, tensor in tensors.items():
        published = name
        for theirs, ours in NAMES_OF_DEEPSEEK:
            published = published.replace(theirs, ours)
        module, _, kind = published.rpartition(".")
        if kind == "down_proj":
            for number, part in enumerate(tensor):
                found[f"{module}.{number}.w2.weight"] = part
        elif kind == "gate_up_proj":
            for number, both in enumerate(tensor):
                for part, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    found[f"{module}.{number}.{part}.weight"] = half
        else:
            found[published] = tensor
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_folder_s_weights_are_those_that_transformers_holds(
    tmp_path: Path, family: TinyFamily, is_tied: bool
) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, tie_word_embeddings=is_tied)
    weights = load(folder)
    assert_equal(weights, expected_of(folder, family, is_tied))
    assert all(weight.is_contiguous() for weight in weights.values())


@pytest.mark.parametrize("family", dict.fromkeys(ARCHITECTURES.values()))
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gguf_file_gives_the_same_weights_as_the_folder_it_was_made_of(
    tmp_path: Path, family: TinyFamily, is_tied: bool
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", family, tie_word_embeddings=is_tied)
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder)
    for dtype in (torch.float32, torch.bfloat16):
        assert_equal(load(path, dtype), load(folder, dtype))


def test_weights_read_in_many_pieces_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder, kind=GGMLQuantizationType.Q8_0)
    whole = load(path)
    for elements in (1, 64 * 7, 64 * 100):
        monkeypatch.setattr(weights_module, "PIECE_ELEMENTS_MAX", elements)
        assert_equal(load(path), whole)


@pytest.mark.parametrize(
    ("kind", "error_max"),
    [
        (GGMLQuantizationType.F16, 1e-3),
        (GGMLQuantizationType.BF16, 1e-2),
        (GGMLQuantizationType.Q8_0, 1e-2),
        (GGMLQuantizationType.Q4_1, 0.2),
    ],
)
def test_each_kind_of_stored_matrix_comes_out_close_to_what_went_in(
    tmp_path: Path, kind: GGMLQuantizationType, error_max: float
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    exact = load(folder)
    quantised = load(make_tiny_gguf(tmp_path / "tiny.gguf", folder, kind=kind))
    for name, weight in exact.items():
        error = (quantised[name] - weight).abs().max() / weight.abs().max()
        assert error <= error_max, name
        assert (error == 0) == (weight.ndim == 1), name


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_have_the_dtype_asked_for_and_what_needs_it_stays_float32(
    tmp_path: Path, family: TinyFamily
) -> None:
    folder = make_tiny_checkpoint(tmp_path, family)
    exact, rounded = load(folder), load(folder, torch.bfloat16)
    for name, weight in rounded.items():
        is_gemma_norm = family == "gemma3" and weight.ndim == 1
        is_exact = is_gemma_norm or (family == "mimo_v2" and ".mlp.gate." in name)
        if family == "deepseek_v4":
            is_exact = not name.endswith(ROUNDED_OF_DEEPSEEK)
        if name.endswith("tid2eid"):
            assert weight.dtype == torch.int64
        else:
            assert weight.dtype == (torch.float32 if is_exact else torch.bfloat16)
        assert torch.equal(weight, exact[name].to(weight.dtype))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bytes_of_all_weights_are_known_without_loading_them(
    family: TinyFamily, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = make_tiny_checkpoint(tmp_path, family)
    loaded = sum(weight.nbytes for weight in load(folder, dtype).values())
    assert weight_bytes(open_checkpoint(str(folder)).config, dtype.itemsize) == loaded


def test_weights_split_over_files_are_the_same(tmp_path: Path) -> None:
    whole = make_tiny_checkpoint(tmp_path / "whole", "gemma3")
    split = make_tiny_checkpoint(tmp_path / "split", "gemma3", shard_bytes_max=100_000)
    assert len(list(split.glob("*.safetensors"))) > 3
    assert_equal(load(split), load(whole))


def test_weights_stored_in_bfloat16_are_widened_exactly(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "gemma3", dtype=torch.bfloat16)
    assert_equal(load(folder), expected_of(folder, "gemma3", is_tied=True))


def test_weights_outlive_the_file_they_came_from(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder)
    for source in (folder / "model.safetensors", path):
        weights = load(folder if source.suffix == ".safetensors" else path)
        before = {name: weight.clone() for name, weight in weights.items()}
        source.write_bytes(bytes(source.stat().st_size))
        assert_equal(weights, before)


def test_progress_counts_up_to_all_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path, "llama")))
    calls: list[tuple[int, int]] = []
    load_weights(checkpoint, torch.float32, lambda done, total: calls.append((done, total)))
    total = len(checkpoint.config.weight_shapes())
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")

    def spoil(tensors: Weights) -> None:
        del tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(3)

    resave(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "missing: model.layers.2.mlp.up_proj.weight;" in message
    assert "unknown: model.layers.9.mlp.up_proj.weight;" in message
    assert "of the wrong shape: model.norm.weight is [3], must be [64]" in message


def test_a_long_list_of_faults_is_cut(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    resave(folder, Weights.clear)
    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens.* and 33 more"):
        load(folder)


def test_a_gguf_file_that_lacks_a_tensor_is_refused_by_its_canonical_name(
    tmp_path: Path,
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder, fields={"llama.block_count": 5})
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.4\.input_layernorm"):
        load(path)
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder, fields={"llama.block_count": 3})
    with pytest.raises(CheckpointError, match=r"unknown: blk\.3\."):
        load(path)


def test_a_spare_head_and_old_buffers_are_left_alone(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    before = load(folder)

    def add(tensors: Weights) -> None:
        tensors["lm_head.weight"] = torch.zeros(384, 64)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    resave(folder, add)
    assert_equal(load(folder), before)


def test_integers_for_weights_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")

    def spoil(tensors: Weights) -> None:
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)

    resave(folder, spoil)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8: must be F32, F16"):
        load(folder)


def test_a_dtype_other_than_the_two_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(CheckpointError, match="must be bfloat16 or float32"):
        load(folder, torch.float16)


def test_damaged_weight_files_are_named(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", shard_bytes_max=100_000)
    second = sorted(folder.glob("*.safetensors"))[1]
    content = second.read_bytes()
    second.write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=f"{second.name}: cannot be read"):
        load(folder)
    second.unlink()
    with pytest.raises(CheckpointError, match=f"{second.name}: cannot be read"):
        load(folder)
    shutil.copy(sorted(folder.glob("*.safetensors"))[0], second)
    with pytest.raises(CheckpointError, match="is in another file too"):
        load(folder)


def test_an_index_cannot_reach_out_of_its_folder(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", shard_bytes_max=100_000)
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'\.\./elsewhere\.safetensors' is not the name"):
        load(folder)


def test_a_gguf_kind_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder)
    content = path.read_bytes()
    # The kind follows the name, the dimension count and the two sizes; I32 is as wide as F32.
    name = b"blk.0.attn_v.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    i32 = int(GGMLQuantizationType.I32).to_bytes(4, "little")
    path.write_bytes(content[:at] + i32 + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"attn_v\.weight is of kind I32"):
        load(path)
