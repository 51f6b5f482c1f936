"""The model families, each with its KV layout and its code, in one explicit table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.config import Family, ModelConfig
from tidegate.engine.models import gemma3, llama
from tidegate.engine.models.parts import Weights
from tidegate.kvcache.layout import Layout
from tidegate.kvcache.page_store import TORCH_DTYPES, PageStore


class Model(Protocol):
    """A model's weights on a device. One launch at a time."""

    def forward(self, batch: Batch, store: PageStore) -> torch.Tensor:
        """Feed the batch's tokens: their keys and values go to `store`, which has the layout
        of the model and its dtype. Returns logits [segments that sample, vocabulary], float32.
        """
        ...


@dataclass(frozen=True, slots=True)
class _FamilyCode:
    layout: Callable[[ModelConfig, int, str], Layout]
    build: Callable[[ModelConfig, Weights, torch.device, torch.dtype], Model]


_FAMILIES: dict[Family, _FamilyCode] = {
    "gemma3": _FamilyCode(gemma3.layout, gemma3.Gemma3),
    "llama": _FamilyCode(llama.layout, llama.Llama),
}


def layout_for(config: ModelConfig, page_tokens: int, dtype: str) -> Layout:
    """The KV layout of a model whose pools hold elements of `dtype` ("bfloat16", "float32").

    Raises `LayoutError` if it cannot be served, for example with pages of 0 tokens.
    """
    layout = _FAMILIES[config.family].layout(config, page_tokens, dtype)
    layout.check()
    return layout


def build_model(
    config: ModelConfig, weights: Weights, device: torch.device | str, dtype: str
) -> Model:
    """The model with its weights on `device` in `dtype`, the pools' too.

    `weights` are as `load_weights` gives them; the model takes them out of the dict.
    """
    code = _FAMILIES[config.family]
    return code.build(config, weights, torch.device(device), TORCH_DTYPES[dtype])
