"""The configuration of GPT-OSS."""

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


class GptOssExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Every layer's experts, of which each token goes through a few.

    An expert's inner numbers are (up + 1) * gate * sigmoid(swiglu_alpha * gate), with the gate
    at most `swiglu_limit`, and up from -swiglu_limit to swiglu_limit.
    """

    count: int
    per_token: int
    width: int  # Inner numbers of one expert.
    swiglu_alpha: float
    swiglu_limit: float

    def __post_init__(self) -> None:
        require_count("expert count", self.count)
        require_count("experts per token", self.per_token, self.count)
        require_count("expert width", self.width)
        require_positive("swiglu_alpha", self.swiglu_alpha)
        require_positive("swiglu_limit", self.swiglu_limit)


class GptOssConfig(ModelConfig, frozen=True, kw_only=True):
    """All layers have the same heads, sinks, rotation and experts."""

    family: ClassVar[Family] = "gpt_oss"

    attention: AttentionShape
    rope: Rope
    experts: GptOssExperts
    has_attention_bias: bool  # Of queries, keys, values and the output projection.

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rope.size == self.attention.key_size,
            "rope size",
            self.rope.size,
            f"must be the head size, which is {self.attention.key_size}",
        )

    def attention_of(self, layer: int) -> AttentionShape:
        return self.attention

    @property
    def mlp_width(self) -> int:
        return self.experts.per_token * self.experts.width

    def weight_shapes(self) -> Shapes:
        """Experts' matrices are [experts, inputs, outputs]. Of the columns of gate_up_proj the
        even ones are the gate's.
        """
        hidden, heads, experts = self.hidden_size, self.attention, self.experts
        projections: Shapes = {
            "q_proj": (heads.query_width, hidden),
            "k_proj": (heads.key_width, hidden),
            "v_proj": (heads.value_width, hidden),
            "o_proj": (hidden, heads.output_width),
        }
        layer: Shapes = {"input_layernorm.weight": (hidden,)}
        for part, shape in projections.items():
            layer[f"self_attn.{part}.weight"] = shape
            if self.has_attention_bias:
                layer[f"self_attn.{part}.bias"] = shape[:1]
        layer |= {
            "self_attn.sinks": (heads.head_count,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.router.weight": (experts.count, hidden),
            "mlp.router.bias": (experts.count,),
            "mlp.experts.gate_up_proj": (experts.count, hidden, 2 * experts.width),
            "mlp.experts.gate_up_proj_bias": (experts.count, 2 * experts.width),
            "mlp.experts.down_proj": (experts.count, experts.width, hidden),
            "mlp.experts.down_proj_bias": (experts.count, hidden),
        }
        return decoder_shapes(self, [layer] * self.layer_count)
