"""Tiny random models of our own code, made without transformers in milliseconds."""

from typing import Literal

import torch

from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.tensor_names import weight_shapes
from tidegate.engine.models.registry import Model, build_model

VOCAB_SIZE = 200
EOS_ID = 1
WINDOW = 32


def tiny_config(family: Literal["llama", "gemma3"]) -> ModelConfig:
    """`gemma3` has window layers and one full layer, `llama` full layers only."""
    is_hybrid = family == "gemma3"
    return ModelConfig(
        family=family,
        name=f"tiny-{family}",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        layer_count=3,
        head_count=2,
        kv_head_count=1,
        head_dim=16,
        norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_theta_window=1000.0 if is_hybrid else None,
        window=WINDOW if is_hybrid else None,
        layer_is_window=(True, False, True) if is_hybrid else (False, False, False),
        query_scale=0.25,
        embedding_scale=1.0,
        tie_embeddings=True,
        context=2048,
        bos_id=None,
        eos_ids=(EOS_ID,),
    )


def tiny_model(config: ModelConfig, seed: int = 0, device: str = "cpu") -> Model:
    """The model in float32; the weights depend on the configuration and the seed only."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if len(shape) > 1
        else 1 + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in weight_shapes(config).items()
    }
    return build_model(config, weights, device, "float32")
