"""Gemma 3 (text): layers with a sliding window between layers with full attention."""

from dataclasses import dataclass

import torch

from tidegate.engine.attention import Scratch, attend
from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.families.gemma3 import Gemma3Config
from tidegate.engine.models.kv_layout import KvPlace, kv_places
from tidegate.engine.models.linear import GatedMlp, Linear, Place
from tidegate.engine.models.parts import (
    Embedding,
    Head,
    Weights,
    capped,
    normalise,
    normalise_in_place,
)
from tidegate.engine.models.rotary import Rotary, interleaved, rotate
from tidegate.kvcache.page_store import PageStore


@dataclass(frozen=True, slots=True)
class _Layer:
    kv: KvPlace
    is_window: bool
    input_norm: torch.Tensor
    query_key_value: Linear
    query_key_norm: torch.Tensor  # [heads + key heads, key size]
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
        self, config: Gemma3Config, weights: Weights, device: torch.device, dtype: torch.dtype
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
        places = kv_places(config)
        self._layers = [self._take_layer(n, places[n], weights) for n in range(len(places))]
        self._norm = weights.pop("model.norm.weight").to(device, torch.float32)
        self._full_rotary = Rotary(config.rope, device)
        # Without window layers nothing asks for their rotations.
        self._window_rotary = Rotary(config.rope_window or config.rope, device)

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
        return capped(self._head(self._normalised(hidden, self._norm)), self._config.logit_cap)

    def _attend(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        batch: Batch,
        store: PageStore,
    ) -> torch.Tensor:
        shape = self._config.attention
        count = shape.head_count + shape.kv_head_count
        split = count * shape.key_size
        fused = layer.query_key_value(self._normalised(hidden, layer.input_norm))
        heads = fused[:, :split].float().view(-1, count, shape.key_size)
        normalise_in_place(heads, self._config.norm_eps).mul_(layer.query_key_norm)
        rotate(heads, rotation)
        heads = heads.to(self._place.dtype)
        return attend(
            batch.groups[layer.kv.group],
            heads[:, : shape.head_count],
            heads[:, shape.head_count :],
            fused[:, split:].view(-1, shape.kv_head_count, shape.value_size),
            store.tensor(layer.kv.group, layer.kv.keys),
            store.tensor(layer.kv.group, layer.kv.values),
            self._scratch,
        )

    def _normalised(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return normalise(hidden, self._config.norm_eps).mul_(weight).to(self._place.dtype)

    def _scaled(self, fresh: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A norm, in float32, of a result that nobody else holds."""
        return normalise_in_place(fresh.float(), self._config.norm_eps).mul_(weight)

    def _take_layer(self, number: int, kv: KvPlace, weights: Weights) -> _Layer:
        config = self._config

        def take(name: str) -> torch.Tensor:
            return weights.pop(f"model.layers.{number}.{name}.weight")

        def norm(name: str) -> torch.Tensor:
            return take(name).to(self._place.device, torch.float32)

        def linear(*parts: torch.Tensor) -> Linear:
            return Linear(parts, self._place)

        shape = config.attention
        head_size = shape.key_size
        # The scale of the scores is part of the queries' norm.
        query_norm = interleaved(norm("self_attn.q_norm"), head_size) * config.query_scale
        key_norm = interleaved(norm("self_attn.k_norm"), head_size)
        return _Layer(
            kv=kv,
            is_window=config.layer_is_window[number],
            input_norm=norm("input_layernorm"),
            query_key_value=linear(
                interleaved(take("self_attn.q_proj"), head_size),
                interleaved(take("self_attn.k_proj"), head_size),
                take("self_attn.v_proj"),
            ),
            query_key_norm=torch.stack(
                [query_norm] * shape.head_count + [key_norm] * shape.kv_head_count
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
