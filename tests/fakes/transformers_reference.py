"""Tiny random models twice: our own, and transformers' as the reference."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from oracle.make_tiny_checkpoint import TinyFamily, make_tiny_checkpoint
from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.weights import load_weights
from tidegate.engine.models.registry import Model, build_model

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Pair:
    config: ModelConfig
    model: Model
    reference: Any

    @torch.no_grad()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        """The reference's logits [tokens, vocabulary]."""
        logits: torch.Tensor = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits


@cache
def pair(
    family: TinyFamily,
    overrides: tuple[tuple[str, Any], ...] = (),
    dtype: str = "float32",
    device: str = "cpu",
) -> Pair:
    """The models of `make_tiny_checkpoint`, ours in `dtype` on `device`; the reference is in
    float32 on the CPU. Tuples among the overrides become lists.
    """
    fields: dict[str, Any] = {name: _as_list(value) for name, value in overrides}
    with TemporaryDirectory() as folder:
        make_tiny_checkpoint(Path(folder), family, **fields)
        auto_model: Any = AutoModelForCausalLM  # Its own types are partial.
        reference = auto_model.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        checkpoint = open_checkpoint(folder)
        weights = load_weights(checkpoint, TORCH_DTYPES[dtype])
        model = build_model(checkpoint.config, weights, device, dtype)
        return Pair(checkpoint.config, model, reference.eval())


def _as_list(value: Any) -> Any:
    items: Any = value
    return list(items) if type(value) is tuple else value
