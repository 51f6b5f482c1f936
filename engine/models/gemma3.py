"""Gemma 3 (text): layers with a sliding window between layers with full attention."""

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
    normalise_in_place,
    rotate,
)
from tidegate.kvcache.page_store import PageStore


@dataclass(frozen=True, slots=True)
class _Layer:
    group: int
    index: int  # Of the layer's keys among the group's tensors; its values follow.
    is_window: bool
    input_norm: torch.Tensor
    query_key_value: Linear
    query_key_norm: torch.Tensor  # [heads + key heads, head_dim]
    output: Linear
    output_norm: torch.Tensor
    mlp_norm: torch.Tensor
    mlp: GatedMlp
    down_norm: torch.Tensor


class Gemma3:
    """Takes the weights out of `weights`, by canonical name, so as not to hold them twice.

    Norm weights hold what the normalised vector is multiplied with, 1 + w.
    """

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
        self._norm = weights.pop("model.norm.weight").to(device, torch.float32)
        self._full_rotary = Rotary(config.head_dim, config.rope_theta, device)
        self._window_rotary = Rotary(config.head_dim, config.rope_theta_window or 1.0, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, store: PageStore) -> torch.Tensor:
        """Logits [segments that sample, vocabulary], float32. Writes the launch's keys and
        values to `store`, whose layout is this model's. The next call overwrites the logits.
        """
        full_rotation = self._full_rotary(batch.positions)
        window_rotation = self._window_rotary(batch.positions)
        hidden = self._embedding(batch.tokens)
        for layer in self._layers:
            rotation = window_rotation if layer.is_window else full_rotation
            attended = self._attend(layer, hidden, rotation, batch, store)
            if layer is self._layers[-1]:
                # Nothing but the logits depends on what follows.
                hidden = hidden.index_select(0, batch.sample_rows)
                attended = attended.index_select(0, batch.sample_rows)
            hidden.add_(self._scaled(layer.output(attended), layer.output_norm))
            hidden.add_(
                self._scaled(
                    layer.mlp(self._normalised(hidden, layer.mlp_norm)), layer.down_norm
                )
            )
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
        normalise_in_place(heads, config.norm_eps).mul_(layer.query_key_norm)
        rotate(heads, rotation)
        heads = heads.to(self._place.dtype)
        return attend(
            batch.groups[layer.group],
            heads[:, : config.head_count],
            heads[:, config.head_count :],
            fused[:, split:].view(-1, config.kv_head_count, config.head_dim),
            store.tensor(layer.group, layer.index),
            store.tensor(layer.group, layer.index + 1),
            self._scratch,
        )

    def _normalised(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return normalise(hidden, self._config.norm_eps).mul_(weight).to(self._place.dtype)

    def _scaled(self, fresh: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A norm, in float32, of a result that nobody else holds."""
        return normalise_in_place(fresh.float(), self._config.norm_eps).mul_(weight)

    def _take_layer(self, number: int, weights: Weights) -> _Layer:
        config = self._config

        def take(name: str) -> torch.Tensor:
            return weights.pop(f"model.layers.{number}.{name}.weight")

        def norm(name: str) -> torch.Tensor:
            return take(name).to(self._place.device, torch.float32)

        def linear(*parts: torch.Tensor) -> Linear:
            return Linear(parts, self._place)

        head_dim = config.head_dim
        # The scale of the scores is part of the queries' norm.
        query_norm = interleaved(norm("self_attn.q_norm"), head_dim) * config.query_scale
        key_norm = interleaved(norm("self_attn.k_norm"), head_dim)
        is_window = config.layer_is_window[number]
        return _Layer(
            group=1 if is_window and not all(config.layer_is_window) else 0,
            index=2 * config.layer_is_window[:number].count(is_window),
            is_window=is_window,
            input_norm=norm("input_layernorm"),
            query_key_value=linear(
                interleaved(take("self_attn.q_proj"), head_dim),
                interleaved(take("self_attn.k_proj"), head_dim),
                take("self_attn.v_proj"),
            ),
            query_key_norm=torch.stack(
                [query_norm] * config.head_count + [key_norm] * config.kv_head_count
            ),
            output=linear(take("self_attn.o_proj")),
            output_norm=norm("post_attention_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            mlp=GatedMlp(
                take("mlp.gate_proj"),
                take("mlp.up_proj"),
                take("mlp.down_proj"),
                "gelu_tanh",
                self._place,
            ),
            down_norm=norm("post_feedforward_layernorm"),
        )
