"""The configuration of Gemma 4 (text), dense and with experts."""

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
from tidegate.engine.checkpoint.families.multimodal import text_tensor_name
from tidegate.engine.checkpoint.rope import Rope
from tidegate.engine.checkpoint.tensor_names import LAYERS, decoder_gguf_names, decoder_shapes

TOKEN_INPUTS = "model.embed_tokens_per_layer.weight"
INPUT_PROJECTION = "model.per_layer_model_projection.weight"
INPUT_NORM = "model.per_layer_projection_norm.weight"

_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "layer_scalar": "layer_output_scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_GGUF_OUTSIDE = {
    TOKEN_INPUTS: "per_layer_token_embd.weight",
    INPUT_PROJECTION: "per_layer_model_proj.weight",
    INPUT_NORM: "per_layer_proj_norm.weight",
}

# What published folders hold even for layers that read the keys and values of another.
_OF_OWNERS = tuple(
    f"self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm", "v_norm")
)


class ExpertSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of each layer, which stand beside its MLP."""

    count: int
    per_token: int  # To how many a token goes.
    width: int  # Inner numbers of one.

    def __post_init__(self) -> None:
        require_count("expert count", self.count)
        require_count("experts per token", self.per_token, self.count)
        require_count("expert width", self.width)


class PerLayerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What each layer is told of a token besides the residual: `width` numbers, made of the
    token's id, which is below `vocab_size`, and of its embedding. No earlier token counts.
    """

    width: int
    vocab_size: int

    def __post_init__(self) -> None:
        require_count("per-layer input width", self.width)
        require_count("per-layer input vocab_size", self.vocab_size)


class Gemma4Config(ModelConfig, frozen=True, kw_only=True):
    """Full-attention layers and window layers have heads and a rotation of their own kind.

    The last `kv_sharing_layer_count` layers read the keys and values of the last layer before
    them that has the same reach.
    """

    family: ClassVar[Family] = "gemma4"

    attention: tuple[AttentionShape, ...]  # One for each layer.
    kv_sharing_layer_count: int
    # In full-attention layers, values come from the keys' projection. They are normalised in
    # another way and are not rotated, so both are cached.
    has_values_from_keys: bool
    intermediate_size: int
    has_wide_mlp: bool  # In layers that share: the MLP is of twice the size there.
    per_layer_inputs: PerLayerInputs | None
    experts: ExpertSizes | None
    rope: Rope  # Of the full-attention layers.
    rope_window: Rope | None  # Of the window layers; None if there are none.
    embedding_scale: float  # Not rounded; Gemma's code rounds it to the weights' dtype.
    logit_cap: float | None  # Logits x become cap * tanh(x / cap).

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("intermediate_size", self.intermediate_size)
        require_positive("embedding_scale", self.embedding_scale)
        if self.logit_cap is not None:
            require_positive("logit_cap", self.logit_cap)
        self.require_each_layer("attention", self.attention)
        require(
            0 <= self.kv_sharing_layer_count < self.layer_count,
            "kv_sharing_layer_count",
            self.kv_sharing_layer_count,
            f"must be from 0 to {self.layer_count - 1}: some layer has to own keys and values",
        )
        require(
            (self.rope_window is not None) == self.has_window_layers,
            "rope_window",
            self.rope_window,
            "must be there if and only if some layers have a window",
        )
        if self.per_layer_inputs is not None:
            require(
                self.per_layer_inputs.vocab_size >= self.vocab_size,
                "per-layer input vocab_size",
                self.per_layer_inputs.vocab_size,
                f"must be at least the vocabulary's size, which is {self.vocab_size}",
            )
        for layer in range(self.layer_count):
            self._check_layer(layer)

    def attention_of(self, layer: int) -> AttentionShape:
        return self.attention[layer]

    def rope_of(self, layer: int) -> Rope:
        window_rope = self.rope_window
        return window_rope if self.layer_is_window[layer] and window_rope else self.rope

    def kv_owner(self, layer: int) -> int:
        if layer < self._first_sharing:
            return layer
        return max(self._possible_owners(layer))

    def mlp_width_of(self, layer: int) -> int:
        is_wide = self.has_wide_mlp and layer >= self._first_sharing
        return self.intermediate_size * (2 if is_wide else 1)

    @property
    def mlp_width(self) -> int:
        widest = max(self.mlp_width_of(layer) for layer in (0, self.layer_count - 1))
        experts = 0 if self.experts is None else self.experts.per_token * self.experts.width
        return widest + experts

    @property
    def carried_width(self) -> int:
        inputs = self.per_layer_inputs
        return 0 if inputs is None else self.layer_count * inputs.width

    def weight_shapes(self) -> Shapes:
        layers = [self._layer_shapes(layer) for layer in range(self.layer_count)]
        shapes = decoder_shapes(self, layers)
        if self.per_layer_inputs is not None:
            width = self.layer_count * self.per_layer_inputs.width
            shapes[TOKEN_INPUTS] = (self.per_layer_inputs.vocab_size, width)
            shapes[INPUT_PROJECTION] = (width, self.hidden_size)
            shapes[INPUT_NORM] = (self.per_layer_inputs.width,)
        return shapes

    def canonical_name(self, stored: str) -> str | None:
        name = text_tensor_name(stored)
        if name is None or not name.startswith(f"{LAYERS}."):
            return name
        number, _, part = name.removeprefix(f"{LAYERS}.").partition(".")
        is_sharing = number.isdecimal() and self._first_sharing <= int(number)
        return None if is_sharing and part in _OF_OWNERS else name

    def gguf_names(self) -> dict[str, str]:
        return decoder_gguf_names(self, _GGUF_PARTS, _GGUF_OUTSIDE)

    def gguf_unused(self) -> frozenset[str]:
        sharing = range(self._first_sharing, self.layer_count)
        parts = ("attn_k", "attn_v", "attn_k_norm")
        return frozenset(f"blk.{layer}.{part}.weight" for layer in sharing for part in parts)

    @property
    def _first_sharing(self) -> int:
        return self.layer_count - self.kv_sharing_layer_count

    def _possible_owners(self, layer: int) -> list[int]:
        reach = self.layer_is_window[layer]
        return [n for n in range(self._first_sharing) if self.layer_is_window[n] == reach]

    def _check_layer(self, layer: int) -> None:
        heads = self.attention[layer]
        for field, size in (
            ("value_size", heads.value_size),
            ("rope size", self.rope_of(layer).size),
        ):
            require(
                size == heads.key_size,
                f"{field} of layer {layer}",
                size,
                f"must be the layer's head size, which is {heads.key_size}",
            )
        if layer >= self._first_sharing:
            kind = "a window" if self.layer_is_window[layer] else "full attention"
            require(
                bool(self._possible_owners(layer)),
                "kv_sharing_layer_count",
                self.kv_sharing_layer_count,
                f"leaves no layer with {kind} whose keys layer {layer} could read",
            )
            owner = self.kv_owner(layer)
            require(
                heads == self.attention[owner],
                f"attention of layer {layer}",
                heads,
                f"must be that of layer {owner}, whose keys it reads: {self.attention[owner]}",
            )

    def _layer_shapes(self, layer: int) -> Shapes:
        hidden, heads = self.hidden_size, self.attention[layer]
        norm, head_norm, inner = (hidden,), (heads.key_size,), self.mlp_width_of(layer)
        shapes: Shapes = {
            "input_layernorm.weight": norm,
            "self_attn.q_proj.weight": (heads.query_width, hidden),
            "self_attn.q_norm.weight": head_norm,
        }
        if self.kv_owner(layer) == layer:
            shapes["self_attn.k_proj.weight"] = (heads.key_width, hidden)
            shapes["self_attn.k_norm.weight"] = head_norm
            if self.layer_is_window[layer] or not self.has_values_from_keys:
                shapes["self_attn.v_proj.weight"] = (heads.value_width, hidden)
        shapes |= {
            "self_attn.o_proj.weight": (hidden, heads.output_width),
            "post_attention_layernorm.weight": norm,
            "pre_feedforward_layernorm.weight": norm,
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "post_feedforward_layernorm.weight": norm,
            "layer_scalar": (1,),
        }
        if self.experts is not None:
            count, width = self.experts.count, self.experts.width
            shapes |= {
                "post_feedforward_layernorm_1.weight": norm,
                "router.scale": norm,
                "router.proj.weight": (count, hidden),
                "router.per_expert_scale": (count,),
                "pre_feedforward_layernorm_2.weight": norm,
                "experts.gate_up_proj": (count, 2 * width, hidden),
                "experts.down_proj": (count, hidden, width),
                "post_feedforward_layernorm_2.weight": norm,
            }
        if self.per_layer_inputs is not None:
            width = self.per_layer_inputs.width
            shapes |= {
                "per_layer_input_gate.weight": (width, hidden),
                "per_layer_projection.weight": (hidden, width),
                "post_per_layer_input_norm.weight": norm,
            }
        return shapes
