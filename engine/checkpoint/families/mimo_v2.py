"""The configuration of MiMo-V2-Flash."""

from typing import ClassVar

import msgspec

from tidegate.engine.checkpoint.config import (
    AttentionShape,
    Family,
    ModelConfig,
    Shapes,
    require,
    require_count,
    require_positive,
)
from tidegate.engine.checkpoint.rope import Rope
from tidegate.engine.checkpoint.tensor_names import decoder_shapes

ROUTER = "mlp.gate.weight"
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
SINKS = "self_attn.attention_sink_bias"

# Published folders hold further heads, which guess several tokens ahead; they are not run.
_GUESSING = "model.mtp."


class MimoV2Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a layer that has them, and how its router chooses.

    An expert's score is the sigmoid of its product with the token. Scores plus a bias of each
    expert decide alone who is chosen: the experts stand in groups of one size, the groups whose
    two best come highest are left, and of these the best experts. A chosen expert's weight is
    its score without the bias.
    """

    count: int
    per_token: int
    width: int  # Inner numbers of one.
    group_count: int
    groups_per_token: int
    normalises_weights: bool  # A token's weights are divided by their sum.
    weight_scale: float  # Then they are multiplied with this.

    def __post_init__(self) -> None:
        require_count("expert count", self.count)
        require_count("expert width", self.width)
        require_count("expert group count", self.group_count)
        require_count("expert groups per token", self.groups_per_token, self.group_count)
        require_positive("expert weight scale", self.weight_scale)
        size = self.group_size
        require(
            size * self.group_count == self.count and size >= 2,
            "expert count",
            self.count,
            f"must be a multiple of the {self.group_count} groups, with two experts in each "
            "at least",
        )
        require_count("experts per token", self.per_token, size * self.groups_per_token)

    @property
    def group_size(self) -> int:
        return self.count // self.group_count


class MimoV2Config(ModelConfig, frozen=True, kw_only=True):
    """Full-attention layers and window layers have heads and a rotation of their own kind.

    Values are multiplied with `value_scale` before they are stored. Window layers have a sink
    for each head.
    """

    family: ClassVar[Family] = "mimo_v2"

    attention: tuple[AttentionShape, ...]  # One for each layer.
    has_attention_bias: bool  # Of queries, keys and values.
    value_scale: float
    rope: Rope  # Of the full-attention layers.
    rope_window: Rope | None  # Of the window layers; None if there are none.
    intermediate_size: int  # Inner numbers of the layers without experts.
    layer_has_experts: tuple[bool, ...]
    experts: MimoV2Experts | None  # None if no layer has any.

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("intermediate_size", self.intermediate_size)
        require_positive("value_scale", self.value_scale)
        self.require_each_layer("attention", self.attention)
        self.require_each_layer("layer_has_experts", self.layer_has_experts)
        require(
            (self.rope_window is not None) == self.has_window_layers,
            "rope_window",
            self.rope_window,
            "must be there if and only if some layers have a window",
        )
        require(
            (self.experts is not None) == any(self.layer_has_experts),
            "experts",
            self.experts,
            "must be there if and only if some layers have them",
        )
        for layer, heads in enumerate(self.attention):
            require(
                self.rope_of(layer).size <= heads.key_size,
                f"rope size of layer {layer}",
                self.rope_of(layer).size,
                f"must be at most the layer's key size, which is {heads.key_size}",
            )

    def attention_of(self, layer: int) -> AttentionShape:
        return self.attention[layer]

    def rope_of(self, layer: int) -> Rope:
        window_rope = self.rope_window
        return window_rope if self.layer_is_window[layer] and window_rope else self.rope

    @property
    def mlp_width(self) -> int:
        experts = 0 if self.experts is None else self.experts.per_token * self.experts.width
        return max(self.intermediate_size, experts)

    def weight_shapes(self) -> Shapes:
        return decoder_shapes(self, [self._layer_shapes(n) for n in range(self.layer_count)])

    def is_float32(self, name: str) -> bool:
        """The router's: scores that round to one bfloat16 number still have an order."""
        return name.endswith((ROUTER, ROUTER_BIAS))

    def canonical_name(self, stored: str) -> str | None:
        return None if stored.startswith(_GUESSING) else stored

    def _layer_shapes(self, layer: int) -> Shapes:
        hidden, heads = self.hidden_size, self.attention[layer]
        widths = {
            "q_proj": heads.query_width,
            "k_proj": heads.key_width,
            "v_proj": heads.value_width,
        }
        shapes: Shapes = {"input_layernorm.weight": (hidden,)}
        for part, width in widths.items():
            shapes[f"self_attn.{part}.weight"] = (width, hidden)
            if self.has_attention_bias:
                shapes[f"self_attn.{part}.bias"] = (width,)
        shapes["self_attn.o_proj.weight"] = (hidden, heads.output_width)
        if self.layer_is_window[layer]:
            shapes[SINKS] = (heads.head_count,)
        shapes["post_attention_layernorm.weight"] = (hidden,)
        if not self.layer_has_experts[layer]:
            return shapes | _mlp_shapes("mlp", hidden, self.intermediate_size)
        assert self.experts is not None, "a layer with experts has their sizes"
        shapes |= {ROUTER: (self.experts.count, hidden), ROUTER_BIAS: (self.experts.count,)}
        for expert in range(self.experts.count):
            shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, self.experts.width)
        return shapes


def _mlp_shapes(module: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{module}.gate_proj.weight": (inner, hidden),
        f"{module}.up_proj.weight": (inner, hidden),
        f"{module}.down_proj.weight": (hidden, inner),
    }
