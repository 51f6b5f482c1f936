"""The code of the model families, in one explicit table. `layouts.py` has their layouts."""

from collections.abc import Callable
from typing import Protocol

import torch

from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.config import Family, ModelConfig
from tidegate.engine.models import gemma3, llama
from tidegate.engine.models.layouts import layout_for as layout_for
from tidegate.engine.models.parts import Weights
from tidegate.kvcache.page_store import TORCH_DTYPES, PageStore


class Model(Protocol):
    """A model's weights on a device. One launch at a time."""

    def forward(self, batch: Batch, store: PageStore) -> torch.Tensor:
        """Feed the batch's tokens: their keys and values go to `store`, which has the layout
        of the model and its dtype. Returns logits [segments that sample, vocabulary], float32.
        """
        ...


Build = Callable[[ModelConfig, Weights, torch.device, torch.dtype], Model]

_MODELS: dict[Family, Build] = {"gemma3": gemma3.Gemma3, "llama": llama.Llama}


def build_model(
    config: ModelConfig, weights: Weights, device: torch.device | str, dtype: str
) -> Model:
    """The model with its weights on `device` in `dtype`, the pools' too.

    `weights` are as `load_weights` gives them; the model takes them out of the dict.
    """
    build = _MODELS[config.family]
    return build(config, weights, torch.device(device), TORCH_DTYPES[dtype])
