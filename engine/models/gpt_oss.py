"""GPT-OSS: window and full layers in turn, attention sinks, and experts in every layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from tidegate.engine.attention import Scratch, attend
from tidegate.engine.batch import Batch
from tidegate.engine.checkpoint.families.gpt_oss import GptOssConfig, GptOssExperts
from tidegate.engine.models.experts import Experts
from tidegate.engine.models.kv_layout import KvPlace, kv_places
from tidegate.engine.models.linear import Linear, Place
from tidegate.engine.models.parts import Embedding, Head, Weights, normalise
from tidegate.engine.models.rotary import Rotary, interleaved, rotate
from tidegate.kvcache.page_store import PageStore


@dataclass(frozen=True, slots=True)
class _Layer:
    kv: KvPlace
    input_norm: torch.Tensor
    query_key_value: Linear
    sinks: torch.Tensor  # [heads], float32
    output: Linear
    mlp_norm: torch.Tensor
    router: torch.Tensor  # [experts, hidden], float32
    router_bias: torch.Tensor  # [experts], float32
    experts: Experts


class GptOss:
    """Takes the weights out of `weights`, by canonical name, so as not to hold them twice."""

    def __init__(
        self, config: GptOssConfig, weights: Weights, device: torch.device, dtype: torch.dtype
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
        self._norm = weights.pop("model.norm.weight").to(device, torch.float32)
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
            hidden.add_(self._expert_sum(layer, hidden))
        return self._head(self._normalised(hidden, self._norm).to(self._place.dtype))

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
        inputs = self._normalised(hidden, layer.input_norm).to(self._place.dtype)
        fused = layer.query_key_value(inputs)
        heads = fused[:, :split].float().view(-1, count, shape.key_size)
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
            layer.sinks,
        )

    def _expert_sum(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's experts on the normalised residual: [tokens, hidden], float32.

        The router takes the highest scores, and weighs by a softmax over these alone. It stays
        in float32, where scores that round to one bfloat16 number still have an order.
        """
        inputs = self._normalised(hidden, layer.mlp_norm)
        scores = functional.linear(inputs, layer.router, layer.router_bias)
        highest, chosen = scores.topk(self._config.experts.per_token, 1)
        return layer.experts(inputs.to(self._place.dtype), chosen, torch.softmax(highest, 1))

    def _normalised(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Float32."""
        return normalise(hidden, self._config.norm_eps).mul_(weight)

    def _take_layer(self, number: int, kv: KvPlace, weights: Weights) -> _Layer:
        config, place = self._config, self._place

        def take(part: str) -> torch.Tensor:
            return weights.pop(f"model.layers.{number}.{part}")

        def exact(part: str) -> torch.Tensor:
            return take(part).to(place.device, torch.float32)

        def projections(kind: str) -> list[torch.Tensor]:
            names = ("q_proj", "k_proj", "v_proj")
            query, key, value = (take(f"self_attn.{name}.{kind}") for name in names)
            size = config.attention.key_size
            return [interleaved(query, size), interleaved(key, size), value]

        biases = projections("bias") if config.has_attention_bias else []
        output_bias = [take("self_attn.o_proj.bias")] if config.has_attention_bias else []
        return _Layer(
            kv=kv,
            input_norm=exact("input_layernorm.weight"),
            query_key_value=Linear(projections("weight"), place, biases),
            sinks=exact("self_attn.sinks"),
            output=Linear([take("self_attn.o_proj.weight")], place, output_bias),
            mlp_norm=exact("post_attention_layernorm.weight"),
            router=exact("mlp.router.weight"),
            router_bias=exact("mlp.router.bias"),
            experts=Experts(
                map(_gate_then_up, take("mlp.experts.gate_up_proj").transpose(1, 2)),
                (down.t().contiguous() for down in take("mlp.experts.down_proj")),
                _ClampedGate(config.experts),
                place,
                gate_up_bias=map(_gate_then_up, take("mlp.experts.gate_up_proj_bias")),
                down_bias=take("mlp.experts.down_proj_bias"),
            ),
        )


class _ClampedGate:
    """What `GptOssExperts` says of an expert's inner numbers."""

    def __init__(self, experts: GptOssExperts) -> None:
        self._alpha = experts.swiglu_alpha
        self._limit = experts.swiglu_limit

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, 1)
        gate = gate.clamp(max=self._limit)
        up = up.clamp(-self._limit, self._limit).add_(1.0)
        return (gate * torch.sigmoid(self._alpha * gate) * up).to(gate_up.dtype)


def _gate_then_up(rows: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up in turn, with all of the gate's before all of up's."""
    return torch.cat([rows[0::2], rows[1::2]])
