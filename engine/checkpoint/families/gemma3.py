"""The configuration of Gemma 3 (text)."""

from typing import ClassVar

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
from tidegate.engine.checkpoint.tensor_names import decoder_gguf_names, decoder_shapes

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
}


class Gemma3Config(ModelConfig, frozen=True, kw_only=True):
    """All layers have the same heads; window layers have a rotation of their own."""

    family: ClassVar[Family] = "gemma3"

    intermediate_size: int
    attention: AttentionShape
    rope: Rope  # Of the full-attention layers.
    rope_window: Rope | None  # Of the window layers; None if there are none.
    query_scale: float  # What query times key is multiplied with before the softmax.
    embedding_scale: float  # Not rounded; Gemma's code rounds it to the weights' dtype.
    logit_cap: float | None = None  # Logits x become cap * tanh(x / cap).

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("intermediate_size", self.intermediate_size)
        require_positive("query_scale", self.query_scale)
        require_positive("embedding_scale", self.embedding_scale)
        if self.logit_cap is not None:
            require_positive("logit_cap", self.logit_cap)
        require(
            (self.rope_window is not None) == self.has_window_layers,
            "rope_window",
            self.rope_window,
            "must be there if and only if some layers have a window",
        )
        for rope in filter(None, (self.rope, self.rope_window)):
            require(
                rope.size == self.attention.key_size,
                "rope size",
                rope.size,
                f"must be the head size, which is {self.attention.key_size}",
            )

    def attention_of(self, layer: int) -> AttentionShape:
        return self.attention

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size

    def weight_shapes(self) -> Shapes:
        hidden, inner, heads = self.hidden_size, self.intermediate_size, self.attention
        norm, head_norm = (hidden,), (heads.key_size,)
        layer: Shapes = {
            "input_layernorm.weight": norm,
            "self_attn.q_proj.weight": (heads.query_width, hidden),
            "self_attn.k_proj.weight": (heads.key_width, hidden),
            "self_attn.v_proj.weight": (heads.value_width, hidden),
            "self_attn.o_proj.weight": (hidden, heads.output_width),
            "self_attn.q_norm.weight": head_norm,
            "self_attn.k_norm.weight": head_norm,
            "post_attention_layernorm.weight": norm,
            "pre_feedforward_layernorm.weight": norm,
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "post_feedforward_layernorm.weight": norm,
        }
        return decoder_shapes(self, [layer] * self.layer_count)

    def gguf_names(self) -> dict[str, str]:
        return decoder_gguf_names(self, _GGUF_PARTS)

    def canonical_name(self, stored: str) -> str | None:
        return text_tensor_name(stored)

    def is_float32(self, name: str) -> bool:
        # Norms hold 1 + w, which bfloat16 would round.
        return name.endswith("norm.weight")

    def stored_offset(self, name: str) -> float:
        return 1.0 if name.endswith("norm.weight") else 0.0
