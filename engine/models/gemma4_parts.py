"""What a layer of Gemma 4 is made of: attention, the MLP and its experts, per-layer inputs."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional

from tidegate.engine.attention import Scratch, attend, attend_stored
from tidegate.engine.attention_plan import GroupPlan
from tidegate.engine.checkpoint.families.gemma4 import (
    INPUT_NORM,
    INPUT_PROJECTION,
    TOKEN_INPUTS,
    Gemma4Config,
    PerLayerInputs,
)
from tidegate.engine.models.experts import Experts
from tidegate.engine.models.kv_layout import KvPlace
from tidegate.engine.models.linear import GatedMlp, Linear, Place
from tidegate.engine.models.parts import Embedding, Weights, normalise, normalise_in_place
from tidegate.engine.models.rotary import interleaved, rotate
from tidegate.kvcache.page_store import PageStore

# Takes a weight of the layer by its name within the layer.
Take = Callable[[str], torch.Tensor]


class Norm:
    """Division by the root mean square, then a product with the weight, both in float32."""

    def __init__(self, weight: torch.Tensor, eps: float, place: Place) -> None:
        self._weight = weight.to(place.device, torch.float32)
        self._eps = eps
        self._dtype = place.dtype

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of float32 vectors, in the weights' type."""
        return normalise(hidden, self._eps).mul_(self._weight).to(self._dtype)

    def fresh(self, result: torch.Tensor) -> torch.Tensor:
        """Of a result that nobody else holds, in float32."""
        return normalise_in_place(result.float(), self._eps).mul_(self._weight)


class Attention:
    """One layer's attention, up to its output projection.

    A layer that owns keys and values stores them; another one reads what its owner has stored
    in the same launch. Where values come from the keys' projection they lie in the pool in
    `interleaved` order, as the keys do, and the output projection is put in that order too.
    """

    def __init__(
        self, config: Gemma4Config, layer: int, kv: KvPlace, take: Take, place: Place
    ) -> None:
        self._kv = kv
        self._shape = shape = config.attention_of(layer)
        self._eps = config.norm_eps
        self._dtype = place.dtype
        self._has_values_from_keys = (
            config.has_values_from_keys and not config.layer_is_window[layer]
        )
        size = shape.key_size

        def head_norm(name: str) -> torch.Tensor:
            return interleaved(take(name).to(place.device, torch.float32), size)

        parts = [interleaved(take("self_attn.q_proj.weight"), size)]
        norms = [head_norm("self_attn.q_norm.weight")] * shape.head_count
        if kv.is_owner:
            parts.append(interleaved(take("self_attn.k_proj.weight"), size))
            norms += [head_norm("self_attn.k_norm.weight")] * shape.kv_head_count
            if not self._has_values_from_keys:
                parts.append(take("self_attn.v_proj.weight"))
        self._projection = Linear(parts, place)
        self._norm = torch.stack(norms)  # [heads + key heads, size]
        output = take("self_attn.o_proj.weight")
        if self._has_values_from_keys:
            output = interleaved(output.t().contiguous(), size).t()
        self._output = Linear([output], place)

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        plans: Sequence[GroupPlan],
        store: PageStore,
        scratch: Scratch,
    ) -> torch.Tensor:
        """[tokens, heads * size] from normalised vectors [tokens, hidden size]. The plans are
        those of the tokens, one for each group.
        """
        shape, kv, plan = self._shape, self._kv, plans[self._kv.group]
        key_pages = store.tensor(kv.group, kv.keys)
        value_pages = store.tensor(kv.group, kv.values)
        fused = self._projection(hidden)
        split = self._norm.numel()
        heads = normalise_in_place(
            fused[:, :split].float().view(-1, *self._norm.shape), self._eps
        )
        if not kv.is_owner:
            rotate(heads.mul_(self._norm), rotation)
            queries = heads.to(self._dtype)
            return attend_stored(plan, queries, key_pages, value_pages, scratch)
        if self._has_values_from_keys:
            values = heads[:, shape.head_count :].to(self._dtype, copy=True)
        else:
            own = fused[:, split:].float().view(-1, shape.kv_head_count, shape.value_size)
            values = normalise_in_place(own, self._eps).to(self._dtype)
        rotate(heads.mul_(self._norm), rotation)
        heads = heads.to(self._dtype)
        queries, keys = heads[:, : shape.head_count], heads[:, shape.head_count :]
        return attend(plan, queries, keys, values, key_pages, value_pages, scratch)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        return self._output(attended)


class FeedForward:
    """A layer's MLP, and the experts beside it if there are any, with the norms around them."""

    def __init__(self, config: Gemma4Config, take: Take, place: Place) -> None:
        def norm(name: str) -> Norm:
            return Norm(take(f"{name}.weight"), config.norm_eps, place)

        self._norm = norm("pre_feedforward_layernorm")
        self._mlp = GatedMlp(
            take("mlp.gate_proj.weight"),
            take("mlp.up_proj.weight"),
            take("mlp.down_proj.weight"),
            "gelu_tanh",
            place,
        )
        self._experts = None
        if config.experts is not None:
            self._mlp_norm = norm("post_feedforward_layernorm_1")
            self._experts = RoutedExperts(config, take, place)
        self._down_norm = norm("post_feedforward_layernorm")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is added to the residual `hidden`: both [tokens, hidden size], float32."""
        result = self._mlp(self._norm(hidden))
        if self._experts is not None:
            result = self._mlp_norm.fresh(result).add_(self._experts(hidden))
        return self._down_norm.fresh(result)


class RoutedExperts:
    """A layer's experts, and the router that looks at the residual itself."""

    def __init__(self, config: Gemma4Config, take: Take, place: Place) -> None:
        assert config.experts is not None
        self._eps = config.norm_eps
        self._per_token = config.experts.per_token
        self._dtype = place.dtype
        scale = take("router.scale").to(place.device, torch.float32)
        self._router_scale = scale * config.hidden_size**-0.5
        self._router = Linear([take("router.proj.weight")], place)
        per_expert = take("router.per_expert_scale")
        self._expert_scale = per_expert.to(place.device, torch.float32)
        self._norm = Norm(take("pre_feedforward_layernorm_2.weight"), self._eps, place)
        self._experts = Experts(
            list(take("experts.gate_up_proj")), list(take("experts.down_proj")), _gated, place
        )
        self._down_norm = Norm(take("post_feedforward_layernorm_2.weight"), self._eps, place)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden size], float32."""
        scaled = normalise(hidden, self._eps).mul_(self._router_scale).to(self._dtype)
        shares = torch.softmax(self._router(scaled).float(), -1)
        best, chosen = shares.topk(self._per_token, dim=-1)
        weights = best / best.sum(-1, keepdim=True) * self._expert_scale[chosen]
        return self._down_norm.fresh(self._experts(self._norm(hidden), chosen, weights))


class TokenInputs:
    """The inputs of all layers: from the tokens' ids, and from their embeddings."""

    def __init__(
        self, config: Gemma4Config, inputs: PerLayerInputs, weights: Weights, place: Place
    ) -> None:
        self._shape = (config.layer_count, inputs.width)
        scale = inputs.width**0.5
        self._embedding = Embedding(weights.pop(TOKEN_INPUTS), scale, place)
        self._projection = Linear([weights.pop(INPUT_PROJECTION)], place)
        self._projection_scale = config.hidden_size**-0.5
        self._norm = Norm(weights.pop(INPUT_NORM), config.norm_eps, place)
        self._dtype = place.dtype

    def __call__(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[tokens, layers, width], in the weights' type."""
        projected = self._projection(embedded.to(self._dtype)).float()
        projected = projected.mul_(self._projection_scale).view(-1, *self._shape)
        both = self._norm.fresh(projected).add_(self._embedding(tokens).view(-1, *self._shape))
        return both.mul_(2**-0.5).to(self._dtype)


class InputGate:
    """Lets a layer's input into the residual."""

    def __init__(self, config: Gemma4Config, take: Take, place: Place) -> None:
        self._dtype = place.dtype
        self._gate = Linear([take("per_layer_input_gate.weight")], place)
        self._projection = Linear([take("per_layer_projection.weight")], place)
        self._norm = Norm(take("post_per_layer_input_norm.weight"), config.norm_eps, place)

    def __call__(self, hidden: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """What is added to `hidden` [tokens, hidden size], given `inputs` [tokens, width]."""
        gate = functional.gelu(self._gate(hidden.to(self._dtype)), approximate="tanh")
        return self._norm.fresh(self._projection(gate.mul_(inputs)))


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """The first half of each row is the gate."""
    gate, up = gate_up.chunk(2, dim=1)
    return functional.gelu(gate, approximate="tanh").mul_(up)
