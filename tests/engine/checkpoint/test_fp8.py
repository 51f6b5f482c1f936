"""Weights stored as FP8 with a scale for each block, as transformers reads them."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import torch as safetensors_torch
from transformers import AutoModelForCausalLM

from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from tidegate.engine.checkpoint import weights as weights_module
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.fp8 import dequantise
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.weights import load_weights

# Some blocks each way. Of matrices that are no multiple of a block transformers takes blocks to
# be smaller, so these are left to the test of `dequantise`.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
LAYERS = "model.layers"
QUERY = f"{LAYERS}.1.self_attn.q_proj.weight"
E4M3_MAX = 448.0


def test_each_block_has_its_own_scale() -> None:
    scales = torch.tensor([[1.0, 10.0], [100.0, 1000.0], [0.5, 0.25]])
    numbers = torch.full((300, 200), 1.5).to(torch.float8_e4m3fn)
    whole = dequantise(numbers, scales, 0)
    assert whole.shape == (300, 200)
    for row, column, factor in (
        (0, 0, 1.0),
        (127, 128, 10.0),
        (128, 127, 100.0),
        (255, 199, 1000.0),
        (256, 0, 0.5),
        (299, 128, 0.25),
    ):
        assert whole[row, column] == 1.5 * factor
    assert torch.equal(dequantise(numbers[120:260], scales, 120), whole[120:260])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    # The ignore: safetensors leaves a parameter of its own open.
    return safetensors_torch.load_file(  # pyright: ignore[reportUnknownMemberType]
        folder / "model.safetensors"
    )


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    # The ignore: as above.
    safetensors_torch.save_file(  # pyright: ignore[reportUnknownMemberType]
        tensors, folder / "model.safetensors", metadata={"format": "pt"}
    )


def make_folder(folder: Path) -> Path:
    """A tiny MiMo-V2-Flash with all matrices of its layers in FP8, but the routers'."""
    make_tiny_checkpoint(folder, "mimo_v2", **SIZES)
    path = folder / "config.json"
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    fields = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(fields))
    tensors = stored(folder)
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            numbers, scales = quantise(tensors[name])
            tensors |= {name: numbers, f"{name}_scale_inv": scales}
    save(folder, tensors)
    return folder


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 numbers, and a scale that lets the largest of each block fit."""
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    rows = [torch.split(part, 128, 1) for part in torch.split(weight, 128)]
    scales = torch.tensor(
        [[block.abs().max().item() / E4M3_MAX for block in row] for row in rows]
    )
    for m, row in enumerate(rows):
        for n, block in enumerate(row):
            part = (slice(128 * m, 128 * m + 128), slice(128 * n, 128 * n + 128))
            numbers[part] = (block / scales[m, n]).to(torch.float8_e4m3fn)
    return numbers, scales


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_weights(open_checkpoint(str(folder)), dtype)


def test_a_folder_in_fp8_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    weights = load(folder)
    exact = {name: tensor for name, tensor in weights.items() if "_proj" in name}
    assert len(exact) == 2 * 4 + 3 + 3 * 8
    reference = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)
    for layer, module in enumerate(reference.model.layers):
        for part in ("q", "k", "v", "o"):
            own: torch.Tensor = getattr(module.self_attn, f"{part}_proj").weight
            name = f"{LAYERS}.{layer}.self_attn.{part}_proj.weight"
            assert torch.equal(weights[name], own.detach().float()), name
    experts = reference.model.layers[1].mlp.experts
    for number in range(8):
        gate, up = experts.gate_up_proj[number].detach().float().chunk(2)
        name = f"{LAYERS}.1.mlp.experts.{number}"
        assert torch.equal(weights[f"{name}.gate_proj.weight"], gate)
        assert torch.equal(weights[f"{name}.up_proj.weight"], up)


def test_rows_read_in_many_pieces_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path)
    whole = load(folder, torch.bfloat16)
    for elements in (1, 7 * 256):
        monkeypatch.setattr(weights_module, "PIECE_ELEMENTS_MAX", elements)
        pieces = load(folder, torch.bfloat16)
        assert all(torch.equal(pieces[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({f"{QUERY}_scale_inv": torch.ones(1, 2, dtype=torch.float64)}, "is F64 [1, 2]"),
        ({f"{QUERY}_scale_inv": torch.ones(2, 1)}, "must be F32 or BF16 [1, 2]"),
        ({QUERY: torch.ones(96, 256)}, f"{QUERY} is F32: must be F8_E4M3"),
        ({f"{QUERY}_scale_inv": None}, f"tensor {QUERY} is F8_E4M3: must be F32"),
        ({QUERY: None}, f"missing: {QUERY}; unknown: {QUERY}_scale_inv"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], named: str
) -> None:
    folder = make_folder(tmp_path)
    tensors: dict[str, torch.Tensor | None] = {**stored(folder), **changes}
    save(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert named in str(caught.value)
