"""Experts stored as MXFP4: by the format's own table, and as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors_torch
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from oracle.make_tiny_checkpoint import randomise
from tidegate.engine.checkpoint import weights as weights_module
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.mxfp4 import BLOCK_BYTES, dequantise
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.weights import load_weights

EXPERTS, HIDDEN, INNER = 3, 64, 32
LAYERS = 2
PREFIX = "model.layers.1.mlp.experts"


def test_each_code_is_the_number_that_the_format_gives_it() -> None:
    # Every code once, two to a byte, the first in the low half.
    blocks = torch.tensor([[[16 * (code + 1) + code for code in range(0, 16, 2)] * 2]])
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = torch.tensor(values + [-value for value in values])
    for scale, factor in ((127, 1.0), (128, 2.0), (120, 2.0**-7)):
        scales = torch.tensor([[scale]], dtype=torch.uint8)
        result = dequantise(blocks.to(torch.uint8), scales)
        assert torch.equal(result, factor * numbers.repeat(2).unsqueeze(0))


def test_a_row_has_its_blocks_side_by_side_each_with_its_own_scale() -> None:
    blocks = torch.randint(0, 256, (5, 4, BLOCK_BYTES), dtype=torch.uint8)
    scales = torch.randint(100, 140, (5, 4), dtype=torch.uint8)
    result = dequantise(blocks, scales)
    assert result.shape == (5, 4 * 32)
    for row in range(5):
        for block in range(4):
            own = dequantise(blocks[row, block, None, None], scales[row, block, None, None])
            assert torch.equal(result[row, 32 * block : 32 * block + 32], own[0])


def make_folder(folder: Path) -> Path:
    """A tiny GPT-OSS whose experts are random blocks and scales."""
    config = GptOssConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        eos_token_id=1,
    )
    model: Any = GptOssForCausalLM(config)
    randomise(model, 0)
    model.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(fields))
    path = folder / "model.safetensors"
    # The ignores: safetensors leaves parameters of its own open.
    tensors = safetensors_torch.load_file(path)  # pyright: ignore[reportUnknownMemberType]
    generator = torch.Generator().manual_seed(1)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    for layer in range(LAYERS):
        for name, outputs, inputs in (
            ("gate_up_proj", 2 * INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):
            full_name = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[full_name]
            shape = (EXPERTS, outputs, inputs // 32)
            tensors[f"{full_name}_blocks"] = random(0, 256, *shape, BLOCK_BYTES)
            tensors[f"{full_name}_scales"] = random(120, 128, *shape)
    safetensors_torch.save_file(tensors, path)  # pyright: ignore[reportUnknownMemberType]
    return folder


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the experts of layer 1, or leave out those that are None."""
    path = folder / "model.safetensors"
    stored = safetensors_torch.load_file(path)  # pyright: ignore[reportUnknownMemberType]
    for name, tensor in tensors.items():
        if tensor is None:
            del stored[f"{PREFIX}.{name}"]
        else:
            stored[f"{PREFIX}.{name}"] = tensor
    safetensors_torch.save_file(stored, path)  # pyright: ignore[reportUnknownMemberType]


@pytest.mark.parametrize("piece_elements", [1, 100, weights_module.PIECE_ELEMENTS_MAX])
def test_stored_blocks_give_the_weights_that_transformers_computes(
    tmp_path: Path, piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "PIECE_ELEMENTS_MAX", piece_elements)
    folder = make_folder(tmp_path)
    auto_model: Any = GptOssForCausalLM
    reference = auto_model.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    expected: dict[str, torch.Tensor] = reference.state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_weights(open_checkpoint(str(folder)), dtype)
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name].to(dtype)), name
    assert weights[f"{PREFIX}.down_proj"].shape == (EXPERTS, INNER, HIDDEN)


def test_blocks_without_scales_and_of_other_sizes_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    change(folder, gate_up_proj_scales=None)
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(CheckpointError) as caught:
        load_weights(checkpoint, torch.float32)
    assert f"missing: {PREFIX}.gate_up_proj;" in str(caught.value)
    assert f"unknown: {PREFIX}.gate_up_proj_blocks" in str(caught.value)
    shape = (EXPERTS, 2 * INNER, 1)
    change(
        folder,
        gate_up_proj_blocks=torch.zeros(*shape, BLOCK_BYTES, dtype=torch.uint8),
        gate_up_proj_scales=torch.zeros(*shape, dtype=torch.uint8),
    )
    with pytest.raises(CheckpointError, match=r"gate_up_proj is \[3, 32, 64\], must be"):
        load_weights(checkpoint, torch.float32)


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("blocks", torch.zeros(3, 64, 2, 16), r"gate_up_proj_blocks is F32 \[3, 64, 2, 16\]"),
        ("scales", torch.zeros(3, 64, 2), r"gate_up_proj_scales is F32 \[3, 64, 2\]"),
        ("scales", torch.zeros(3, 64, 1, dtype=torch.uint8), r"_scales is U8 \[3, 64, 1\]"),
        (
            "blocks",
            torch.zeros(3, 64, 4, 8, dtype=torch.uint8),
            r"gate_up_proj_blocks is U8 \[3, 64, 4, 8\]",
        ),
    ],
)
def test_blocks_and_scales_that_do_not_belong_together_are_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor, named: str
) -> None:
    folder = make_folder(tmp_path)
    change(folder, **{f"gate_up_proj_{name}": tensor})
    with pytest.raises(CheckpointError, match=named):
        load_weights(open_checkpoint(str(folder)), torch.float32)
