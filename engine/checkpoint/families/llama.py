"""The configuration of Llama and models of its shape: Mistral, Qwen 2 and 3, SmolLM."""

from typing import ClassVar

from tidegate.engine.checkpoint.config import (
    AttentionShape,
    Family,
    ModelConfig,
    Shapes,
    require,
    require_count,
)
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
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class LlamaConfig(ModelConfig, frozen=True, kw_only=True):
    """All layers have the same heads and the same rotation, where they rotate at all."""

    family: ClassVar[Family] = "llama"

    intermediate_size: int
    attention: AttentionShape
    rope: Rope
    layer_has_rope: tuple[bool, ...]  # False: the layer knows no positions (SmolLM3).
    has_query_key_norm: bool  # A norm over each query and key head, before the rotation.
    has_query_key_value_bias: bool
    has_output_bias: bool  # Of attention's output projection.
    has_mlp_bias: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("intermediate_size", self.intermediate_size)
        self.require_each_layer("layer_has_rope", self.layer_has_rope)
        require(
            self.rope.size <= self.attention.key_size,
            "rope size",
            self.rope.size,
            f"must be at most the head size, which is {self.attention.key_size}",
        )

    def attention_of(self, layer: int) -> AttentionShape:
        return self.attention

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size

    def weight_shapes(self) -> Shapes:
        hidden, inner, heads = self.hidden_size, self.intermediate_size, self.attention
        norm = (hidden,)
        matrices: Shapes = {
            "self_attn.q_proj": (heads.query_width, hidden),
            "self_attn.k_proj": (heads.key_width, hidden),
            "self_attn.v_proj": (heads.value_width, hidden),
            "self_attn.o_proj": (hidden, heads.output_width),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        layer: Shapes = {
            "input_layernorm.weight": norm,
            "post_attention_layernorm.weight": norm,
        }
        for part, shape in matrices.items():
            layer[f"{part}.weight"] = shape
            if self._has_bias(part):
                layer[f"{part}.bias"] = shape[:1]
        if self.has_query_key_norm:
            layer["self_attn.q_norm.weight"] = (heads.key_size,)
            layer["self_attn.k_norm.weight"] = (heads.key_size,)
        return decoder_shapes(self, [layer] * self.layer_count)

    def gguf_names(self) -> dict[str, str]:
        return decoder_gguf_names(self, _GGUF_PARTS)

    def _has_bias(self, part: str) -> bool:
        if part.startswith("mlp"):
            return self.has_mlp_bias
        return (
            self.has_output_bias if part.endswith("o_proj") else self.has_query_key_value_bias
        )
