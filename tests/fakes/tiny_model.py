"""Tiny random models of our own code, made without transformers in milliseconds."""

from typing import Any

import torch

from tidegate.engine.checkpoint.config import AttentionShape, Family, ModelConfig
from tidegate.engine.checkpoint.families.gemma3 import Gemma3Config
from tidegate.engine.checkpoint.families.gemma4 import Gemma4Config
from tidegate.engine.checkpoint.families.gpt_oss import GptOssConfig, GptOssExperts
from tidegate.engine.checkpoint.families.llama import LlamaConfig
from tidegate.engine.checkpoint.families.mimo_v2 import MimoV2Config, MimoV2Experts
from tidegate.engine.checkpoint.rope import Rope
from tidegate.engine.models.registry import Model, build_model

VOCAB_SIZE = 200
EOS_ID = 1
WINDOW = 32


def tiny_config(family: Family) -> ModelConfig:
    """`llama` has full layers only, the others have window layers and one full layer."""
    heads = AttentionShape(head_count=2, kv_head_count=1, key_size=16, value_size=16)
    common: dict[str, Any] = {
        "name": f"tiny-{family}",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "layer_count": 3,
        "attention": heads,
        "norm_eps": 1e-6,
        "rope": Rope(theta=10_000.0, size=16),
        "tie_embeddings": True,
        "context": 2048,
        "bos_id": None,
        "eos_ids": (EOS_ID,),
    }
    if family == "gpt_oss":
        return GptOssConfig(
            **common,
            experts=GptOssExperts(
                count=4, per_token=2, width=16, swiglu_alpha=1.702, swiglu_limit=7.0
            ),
            has_attention_bias=True,
            window=WINDOW,
            layer_is_window=(True, False, True),
        )
    common["intermediate_size"] = 64
    if family == "llama":
        return LlamaConfig(
            **common,
            window=None,
            layer_is_window=(False, False, False),
            layer_has_rope=(True, True, True),
            has_query_key_norm=False,
            has_query_key_value_bias=False,
            has_output_bias=False,
            has_mlp_bias=False,
        )
    if family == "mimo_v2":
        narrow = AttentionShape(head_count=2, kv_head_count=2, key_size=16, value_size=8)
        common["attention"] = (narrow, heads, narrow)
        return MimoV2Config(
            **common,
            has_attention_bias=False,
            value_scale=0.7,
            rope_window=Rope(theta=1000.0, size=8),
            window=WINDOW,
            layer_is_window=(True, False, True),
            layer_has_experts=(False, True, True),
            experts=MimoV2Experts(
                count=4,
                per_token=2,
                width=16,
                group_count=2,
                groups_per_token=1,
                normalises_weights=True,
                weight_scale=1.0,
            ),
        )
    if family == "gemma4":
        common["attention"] = (heads,) * 3
        return Gemma4Config(
            **common,
            rope_window=Rope(theta=1000.0, size=16),
            window=WINDOW,
            layer_is_window=(True, False, True),
            kv_sharing_layer_count=0,
            has_values_from_keys=True,
            has_wide_mlp=False,
            per_layer_inputs=None,
            experts=None,
            embedding_scale=1.0,
            logit_cap=None,
        )
    return Gemma3Config(
        **common,
        rope_window=Rope(theta=1000.0, size=16),
        window=WINDOW,
        layer_is_window=(True, False, True),
        query_scale=0.25,
        embedding_scale=1.0,
    )


def tiny_model(config: ModelConfig, seed: int = 5, device: str = "cpu") -> Model:
    """The model in float32; the weights depend on the names, the sizes and the seed only.

    With the seed given here the texts of all families go through many different tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if len(shape) > 1
        else 1 + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in sorted(config.weight_shapes().items())
    }
    return build_model(config, weights, device, "float32")
