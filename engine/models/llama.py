"""Llama and models of its shape, for example SmolLM2: full attention in every layer."""

from dataclasses import dataclass

import torch

from tidegate.engine.attention import Scratch, attend
from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.models.linear import GatedMlp, Linear, Place
from tidegate.engine.models.parts import (
    Embedding,
    Head,
    Rotary,
    Weights,
    interleaved,
    normalise,
    rotate,
)
from tidegate.kvcache.page_store import PageStore


@dataclass(frozen=True, slots=True)
class _Layer:
    number: int
    input_norm: torch.Tensor
    query_key_value: Linear
    output: Linear
    mlp_norm: torch.Tensor
    mlp: GatedMlp


class Llama:
    """Takes the weights out of `weights`, by canonical name, so as not to hold them twice."""

    def __init__(
        self, config: ModelConfig, weights: Weights, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._place = Place(device, dtype)
        self._scratch = Scratch()
        embedding = weights.pop("model.embed_tokens.weight")
        self._embedding = Embedding(embedding, config.embedding_scale, self._place)
        head = self._embedding.weight
        if not config.tie_embeddings:
            head = weights.pop("lm_head.weight")
        self._head = Head(head, self._place)
        self._layers = [self._take_layer(n, weights) for n in range(config.layer_count)]
        self._norm = weights.pop("model.norm.weight").to(device, dtype)
        self._rotary = Rotary(config.head_dim, config.rope_theta, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, store: PageStore) -> torch.Tensor:
        """Logits [segments that sample, vocabulary], float32. Writes the launch's keys and
        values to `store`, whose layout is this model's. The next call overwrites the logits.
        """
        rotation = self._rotary(batch.positions)
        hidden = self._embedding(batch.tokens)
        for layer in self._layers:
            attended = self._attend(layer, hidden, rotation, batch, store)
            if layer is self._layers[-1]:
                # Nothing but the logits depends on what follows.
                hidden = hidden.index_select(0, batch.sample_rows)
                attended = attended.index_select(0, batch.sample_rows)
            hidden.add_(layer.output(attended))
            hidden.add_(layer.mlp(self._normalised(hidden, layer.mlp_norm)))
        return self._head(self._normalised(hidden, self._norm))

    def _attend(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        batch: Batch,
        store: PageStore,
    ) -> torch.Tensor:
        config = self._config
        count = config.head_count + config.kv_head_count
        split = count * config.head_dim
        fused = layer.query_key_value(self._normalised(hidden, layer.input_norm))
        heads = fused[:, :split].float().view(-1, count, config.head_dim)
        rotate(heads, rotation)
        heads[:, : config.head_count].mul_(config.query_scale)
        heads = heads.to(self._place.dtype)
        return attend(
            batch.groups[0],
            heads[:, : config.head_count],
            heads[:, config.head_count :],
            fused[:, split:].view(-1, config.kv_head_count, config.head_dim),
            store.tensor(0, 2 * layer.number),
            store.tensor(0, 2 * layer.number + 1),
            self._scratch,
        )

    def _normalised(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Llama multiplies by the weight after it has left float32.
        return normalise(hidden, self._config.norm_eps).to(self._place.dtype).mul_(weight)

    def _take_layer(self, number: int, weights: Weights) -> _Layer:
        head_dim = self._config.head_dim

        def take(name: str) -> torch.Tensor:
            return weights.pop(f"model.layers.{number}.{name}.weight")

        def norm(name: str) -> torch.Tensor:
            return take(name).to(self._place.device, self._place.dtype)

        def linear(*parts: torch.Tensor) -> Linear:
            return Linear(parts, self._place)

        return _Layer(
            number=number,
            input_norm=norm("input_layernorm"),
            query_key_value=linear(
                interleaved(take("self_attn.q_proj"), head_dim),
                interleaved(take("self_attn.k_proj"), head_dim),
                take("self_attn.v_proj"),
            ),
            output=linear(take("self_attn.o_proj")),
            mlp_norm=norm("post_attention_layernorm"),
            mlp=GatedMlp(
                take("mlp.gate_proj"),
                take("mlp.up_proj"),
                take("mlp.down_proj"),
                "silu",
                self._place,
            ),
        )
