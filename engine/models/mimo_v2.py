"""MiMo-V2-Flash: window layers with sinks between full ones, and experts in most layers.

The two kinds of layer have other numbers of key heads and other rotations, which turn a part of
a head only. Values are narrower than keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from tidegate.engine.attention import Scratch, attend
from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.families.mimo_v2 import (
    ROUTER,
    ROUTER_BIAS,
    SINKS,
    MimoV2Config,
    MimoV2Experts,
)
from tidegate.engine.models.experts import Experts
from tidegate.engine.models.kv_layout import KvPlace, kv_places
from tidegate.engine.models.linear import GatedMlp, Linear, Place
from tidegate.engine.models.parts import Embedding, Head, Weights, normalise
from tidegate.engine.models.rotary import Rotary, interleaved, rotate
from tidegate.kvcache.page_store import PageStore

# Takes a weight of the layer by its name within the layer.
Take = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    number: int
    kv: KvPlace
    is_window: bool
    input_norm: torch.Tensor
    query_key_value: Linear
    sinks: torch.Tensor | None  # [heads], float32
    output: Linear
    mlp_norm: torch.Tensor
    mlp: "Mlp | RoutedExperts"


class MimoV2:
    """Takes the weights out of `weights`, by canonical name, so as not to hold them twice."""

    def __init__(
        self, config: MimoV2Config, weights: Weights, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._place = Place(device, dtype)
        self._scratch = Scratch()
        self._embedding = Embedding(weights.pop("model.embed_tokens.weight"), 1.0, self._place)
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
        rotations = self._full_rotary(batch.positions), self._window_rotary(batch.positions)
        hidden = self._embedding(batch.tokens)
        for layer in self._layers:
            attended = self._attend(layer, hidden, rotations[layer.is_window], batch, store)
            if layer is self._layers[-1]:
                # Nothing but the logits depends on what follows.
                hidden = hidden.index_select(0, batch.sample_rows)
                attended = attended.index_select(0, batch.sample_rows)
            hidden.add_(layer.output(attended))
            hidden.add_(layer.mlp(self._normalised(hidden, layer.mlp_norm)))
        return self._head(self._normalised(hidden, self._norm).to(self._place.dtype))

    def _attend(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        batch: Batch,
        store: PageStore,
    ) -> torch.Tensor:
        shape = self._config.attention_of(layer.number)
        count = shape.head_count + shape.kv_head_count
        split = count * shape.key_size
        inputs = self._normalised(hidden, layer.input_norm).to(self._place.dtype)
        fused = layer.query_key_value(inputs)
        heads = fused[:, :split].float().view(-1, count, shape.key_size)
        rotate(heads, rotation)
        heads[:, : shape.head_count].mul_(shape.key_size**-0.5)
        heads = heads.to(self._place.dtype)
        values = fused[:, split:] * self._config.value_scale
        return attend(
            batch.groups[layer.kv.group],
            heads[:, : shape.head_count],
            heads[:, shape.head_count :],
            values.view(-1, shape.kv_head_count, shape.value_size),
            store.tensor(layer.kv.group, layer.kv.keys),
            store.tensor(layer.kv.group, layer.kv.values),
            self._scratch,
            layer.sinks,
        )

    def _normalised(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Float32."""
        return normalise(hidden, self._config.norm_eps).mul_(weight)

    def _take_layer(self, number: int, kv: KvPlace, weights: Weights) -> _Layer:
        config, place = self._config, self._place
        is_window = config.layer_is_window[number]
        key_size, rotated = config.attention_of(number).key_size, config.rope_of(number).size

        def take(part: str) -> torch.Tensor:
            return weights.pop(f"model.layers.{number}.{part}")

        def exact(part: str) -> torch.Tensor:
            return take(part).to(place.device, torch.float32)

        def projections(kind: str) -> list[torch.Tensor]:
            names = ("q_proj", "k_proj", "v_proj")
            query, key, value = (take(f"self_attn.{name}.{kind}") for name in names)
            turned = [interleaved(weight, key_size, rotated) for weight in (query, key)]
            return [*turned, value]

        biases = projections("bias") if config.has_attention_bias else []
        mlp: Mlp | RoutedExperts
        if config.layer_has_experts[number]:
            assert config.experts is not None, "a layer with experts has their sizes"
            mlp = RoutedExperts(config.experts, take, place)
        else:
            mlp = Mlp(take, place)
        return _Layer(
            number=number,
            kv=kv,
            is_window=is_window,
            input_norm=exact("input_layernorm.weight"),
            query_key_value=Linear(projections("weight"), place, biases),
            sinks=exact(SINKS) if is_window else None,
            output=Linear([take("self_attn.o_proj.weight")], place),
            mlp_norm=exact("post_attention_layernorm.weight"),
            mlp=mlp,
        )


class Mlp:
    """The MLP of a layer without experts."""

    def __init__(self, take: Take, place: Place) -> None:
        gate, up, down = (take(f"mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
        self._mlp = GatedMlp(gate, up, down, "silu", place)
        self._dtype = place.dtype

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], from normalised `inputs` of that shape in float32."""
        return self._mlp(inputs.to(self._dtype))


class RoutedExperts:
    """The experts of a layer, and their router, which computes in float32.

    `MimoV2Experts` says how it chooses.
    """

    def __init__(self, experts: MimoV2Experts, take: Take, place: Place) -> None:
        self._sizes = experts
        self._dtype = place.dtype
        self._router = take(ROUTER).to(place.device, torch.float32)
        self._bias = take(ROUTER_BIAS).to(place.device, torch.float32)
        self._experts = Experts(
            _gates_and_ups(experts.count, take),
            (take(f"mlp.experts.{n}.down_proj.weight") for n in range(experts.count)),
            _gated,
            place,
        )

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], float32, from normalised `inputs` of that shape and type."""
        scores = functional.linear(inputs, self._router).sigmoid_()
        chosen = self._choose(scores + self._bias)
        weights = scores.gather(1, chosen)
        if self._sizes.normalises_weights:
            # The small term is the reference's, in case that all scores are 0.
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        weights = weights * self._sizes.weight_scale
        return self._experts(inputs.to(self._dtype), chosen, weights)

    def _choose(self, ranks: torch.Tensor) -> torch.Tensor:
        """The numbers of each token's experts [tokens, k], from what ranks all of them."""
        sizes = self._sizes
        if sizes.groups_per_token < sizes.group_count:
            by_group = ranks.view(-1, sizes.group_count, sizes.group_size)
            best_two = by_group.topk(2, -1).values.sum(-1)
            kept = best_two.topk(sizes.groups_per_token, -1).indices
            is_left_out = torch.ones_like(best_two, dtype=torch.bool).scatter_(1, kept, False)
            ranks = by_group.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(1)
        return ranks.topk(sizes.per_token, -1).indices


def _gates_and_ups(count: int, take: Take) -> Iterator[torch.Tensor]:
    """For each expert the gate's rows, then those of up."""
    for expert in range(count):
        parts = ("gate_proj", "up_proj")
        yield torch.cat([take(f"mlp.experts.{expert}.{part}.weight") for part in parts])


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return functional.silu(gate).mul_(up)
