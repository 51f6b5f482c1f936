"""Llama and models of its shape: Mistral, Qwen 2 and 3, SmolLM 2 and 3."""

from dataclasses import dataclass

import torch

from tidegate.engine.attention import Scratch, attend
from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.families.llama import LlamaConfig
from tidegate.engine.models.kv_layout import KvPlace, kv_places
from tidegate.engine.models.linear import GatedMlp, Linear, Place
from tidegate.engine.models.parts import (
    Embedding,
    Head,
    Weights,
    normalise,
    normalise_in_place,
)
from tidegate.engine.models.rotary import Rotary, interleaved, rotate
from tidegate.kvcache.page_store import PageStore


@dataclass(frozen=True, slots=True)
class _Layer:
    kv: KvPlace
    has_rope: bool
    input_norm: torch.Tensor
    query_key_value: Linear
    query_key_norm: torch.Tensor | None  # [heads + key heads, key size]
    output: Linear
    mlp_norm: torch.Tensor
    mlp: GatedMlp


class Llama:
    """Takes the weights out of `weights`, by canonical name, so as not to hold them twice."""

    def __init__(
        self, config: LlamaConfig, weights: Weights, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._place = Place(device, dtype)
        self._scratch = Scratch()
        self._query_scale = config.attention.key_size**-0.5
        self._embedding = Embedding(weights.pop("model.embed_tokens.weight"), 1.0, self._place)
        head = self._embedding.weight
        if not config.tie_embeddings:
            head = weights.pop("lm_head.weight")
        self._head = Head(head, self._place)
        places = kv_places(config)
        self._layers = [self._take_layer(n, places[n], weights) for n in range(len(places))]
        self._norm = weights.pop("model.norm.weight").to(device, dtype)
        self._rotary = Rotary(config.rope, device)

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
        shape = self._config.attention
        count = shape.head_count + shape.kv_head_count
        split = count * shape.key_size
        fused = layer.query_key_value(self._normalised(hidden, layer.input_norm))
        heads = fused[:, :split].float().view(-1, count, shape.key_size)
        if layer.query_key_norm is not None:
            normalise_in_place(heads, self._config.norm_eps).mul_(layer.query_key_norm)
        if layer.has_rope:
            rotate(heads, rotation)
        heads[:, : shape.head_count].mul_(self._query_scale)
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
        # Llama multiplies by the weight after it has left float32.
        return normalise(hidden, self._config.norm_eps).to(self._place.dtype).mul_(weight)

    def _take_layer(self, number: int, kv: KvPlace, weights: Weights) -> _Layer:
        config, shape = self._config, self._config.attention

        def take(part: str, kind: str = "weight") -> torch.Tensor:
            return weights.pop(f"model.layers.{number}.{part}.{kind}")

        def norm(part: str) -> torch.Tensor:
            return take(part).to(self._place.device, self._place.dtype)

        def biases(is_there: bool, *parts: str) -> list[torch.Tensor]:
            return [take(part, "bias") for part in parts] if is_there else []

        def paired(weight: torch.Tensor) -> torch.Tensor:
            return interleaved(weight, shape.key_size, config.rope.size)

        query_key_norm = None
        if config.has_query_key_norm:
            query_norm, key_norm = (
                paired(norm(f"self_attn.{part}")).float() for part in ("q_norm", "k_norm")
            )
            query_key_norm = torch.stack(
                [query_norm] * shape.head_count + [key_norm] * shape.kv_head_count
            )
        inputs = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        query, key, value = (take(part) for part in inputs)
        input_biases = biases(config.has_query_key_value_bias, *inputs)
        input_biases[:2] = [paired(bias) for bias in input_biases[:2]]
        gated = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        gate, up, down = (take(part) for part in gated)
        return _Layer(
            kv=kv,
            has_rope=config.layer_has_rope[number],
            input_norm=norm("input_layernorm"),
            query_key_value=Linear(
                [paired(query), paired(key), value], self._place, input_biases
            ),
            query_key_norm=query_key_norm,
            output=Linear(
                [take("self_attn.o_proj")],
                self._place,
                biases(config.has_output_bias, "self_attn.o_proj"),
            ),
            mlp_norm=norm("post_attention_layernorm"),
            mlp=GatedMlp(
                gate, up, down, "silu", self._place, biases(config.has_mlp_bias, *gated)
            ),
        )
