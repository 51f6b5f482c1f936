"""The code of the model families, by their configurations. `layouts.py` has the layouts."""

from typing import Protocol

import torch

from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.families.deepseek_v4 import DeepSeekV4Config
from tidegate.engine.checkpoint.families.gemma3 import Gemma3Config
from tidegate.engine.checkpoint.families.gemma4 import Gemma4Config
from tidegate.engine.checkpoint.families.gpt_oss import GptOssConfig
from tidegate.engine.checkpoint.families.llama import LlamaConfig
from tidegate.engine.checkpoint.families.mimo_v2 import MimoV2Config
from tidegate.engine.models.deepseek_v4 import DeepSeekV4
from tidegate.engine.models.gemma3 import Gemma3
from tidegate.engine.models.gemma4 import Gemma4
from tidegate.engine.models.gpt_oss import GptOss
from tidegate.engine.models.layouts import layout_for as layout_for
from tidegate.engine.models.llama import Llama
from tidegate.engine.models.mimo_v2 import MimoV2
from tidegate.engine.models.parts import Weights
from tidegate.kvcache.page_store import TORCH_DTYPES, PageStore


class Model(Protocol):
    """A model's weights on a device. One launch at a time."""

    def forward(self, batch: Batch, store: PageStore) -> torch.Tensor:
        """Feed the batch's tokens: their keys and values go to `store`, which has the layout
        of the model and its dtype. Returns logits [segments that sample, vocabulary], float32.
        """
        ...


def build_model(
    config: ModelConfig, weights: Weights, device: torch.device | str, dtype: str
) -> Model:
    """The model with its weights on `device` in `dtype`, the pools' too.

    `weights` are as `load_weights` gives them; the model takes them out of the dict.
    """
    place, kind = torch.device(device), TORCH_DTYPES[dtype]
    match config:
        case DeepSeekV4Config():
            return DeepSeekV4(config, weights, place, kind)
        case Gemma3Config():
            return Gemma3(config, weights, place, kind)
        case Gemma4Config():
            return Gemma4(config, weights, place, kind)
        case GptOssConfig():
            return GptOss(config, weights, place, kind)
        case LlamaConfig():
            return Llama(config, weights, place, kind)
        case MimoV2Config():
            return MimoV2(config, weights, place, kind)
        case _:
            raise AssertionError(f"no code for the {config.family} family")
