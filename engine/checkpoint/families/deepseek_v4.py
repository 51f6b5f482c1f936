"""The configuration of DeepSeek V4, and the names of its weights."""

from typing import ClassVar, Literal

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
from tidegate.engine.checkpoint.tensor_names import HEAD, decoder_shapes

# "window": the last tokens alone. "csa", compressed sparse attention, adds the compressed
# entries that an indexer chooses. "hca", heavily compressed attention, adds all of its entries.
LayerKind = Literal["window", "csa", "hca"]
Scoring = Literal["sqrtsoftplus", "sigmoid", "softmax"]

# An entry of CSA is made of two windows of tokens, its own and the one before.
SERIES: dict[LayerKind, int] = {"csa": 2, "hca": 1}
# Ends of names of weights that stay float32: they scale, gate, route or mix.
FLOAT32_ENDS = (
    *("norm.weight", ".attn_sink", ".ape", ".wgate.weight", ".weights_proj.weight"),
    *(".gate.weight", ".gate.bias"),
    *("_fn", "_base", "_scale"),
)
EXPERT_TABLE = ".gate.tid2eid"


class IndexerSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The small attention by which CSA chooses up to `entry_count_max` entries for a query."""

    head_count: int
    head_size: int
    entry_count_max: int

    def __post_init__(self) -> None:
        require_count("indexer heads", self.head_count)
        require_count("indexer head size", self.head_size)
        require_count("index_topk", self.entry_count_max)


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Every layer's experts: `per_token` of `count`, and one more that all tokens go through.

    An expert's inner numbers are silu(gate) * up, with the gate at most `limit`, and up from
    -limit to limit. The chosen experts' scores are divided by their sum and multiplied with
    `factor`.
    """

    count: int
    per_token: int
    width: int  # Inner numbers of one expert.
    scoring: Scoring
    factor: float
    limit: float

    def __post_init__(self) -> None:
        require_count("expert count", self.count)
        require_count("experts per token", self.per_token, self.count)
        require_count("expert width", self.width)
        require_positive("routed_scaling_factor", self.factor)
        require_positive("swiglu_limit", self.limit)


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Hyper-connections: the residual is `count` streams, which every block mixes.

    The matrix that mixes them is made doubly stochastic by `round_count` rounds of scaling its
    rows and columns, with `eps` added to the sums.
    """

    count: int
    round_count: int
    eps: float

    def __post_init__(self) -> None:
        require_count("hc_mult", self.count)
        require_count("hc_sinkhorn_iters", self.round_count)
        require_positive("hc_eps", self.eps)


class DeepSeekV4Config(ModelConfig, frozen=True, kw_only=True):
    """`layer_is_window` says which layers have a window and nothing else; all have one."""

    family: ClassVar[Family] = "deepseek_v4"

    attention: AttentionShape  # One key head, whose keys are the values too.
    query_rank: int
    output_group_count: int
    output_rank: int  # Numbers of each group of heads between the two output projections.
    layer_kinds: tuple[LayerKind, ...]
    csa_ratio: int  # Tokens that a compressed entry stands for.
    hca_ratio: int
    indexer: IndexerSizes
    layer_has_table: tuple[bool, ...]  # Experts looked up by token, not chosen by score.
    experts: RoutedExperts
    streams: Streams
    rope: Rope  # Of layers with compressed entries. The last numbers of a head turn.
    rope_window: Rope  # Of the others.

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("query_rank", "output_group_count", "output_rank"):
            require_count(field, getattr(self, field))
        for field in ("csa_ratio", "hca_ratio"):
            require_count(field, getattr(self, field), 4096)
        self.require_each_layer("layer_kinds", self.layer_kinds)
        self.require_each_layer("layer_has_table", self.layer_has_table)
        require(
            self.layer_is_window == tuple(kind == "window" for kind in self.layer_kinds),
            "layer_is_window",
            self.layer_is_window,
            f"must say which of layer_kinds, {self.layer_kinds}, are window layers",
        )
        heads = self.attention
        require(heads.kv_head_count == 1, "kv_head_count", heads.kv_head_count, "must be 1")
        require(
            heads.value_size == heads.key_size,
            "value_size",
            heads.value_size,
            f"must be the key size, which is {heads.key_size}: keys are the values",
        )
        require(
            heads.head_count % self.output_group_count == 0,
            "output_group_count",
            self.output_group_count,
            f"must divide the number of heads, which is {heads.head_count}",
        )
        size_max = min(heads.key_size, self.indexer.head_size)
        for field, rope in (("rope", self.rope), ("rope_window", self.rope_window)):
            require(
                rope.size <= size_max,
                f"{field} size",
                rope.size,
                f"must be at most {size_max}, the size of the smallest head",
            )

    @property
    def has_window_layers(self) -> bool:
        return True

    def attention_of(self, layer: int) -> AttentionShape:
        return self.attention

    def ratio_of(self, kind: LayerKind) -> int:
        """Tokens that a compressed entry of this kind of layer stands for."""
        assert kind != "window", "a window layer has no compressed entries"
        return self.csa_ratio if kind == "csa" else self.hca_ratio

    @property
    def mlp_width(self) -> int:
        return (self.experts.per_token + 1) * self.experts.width

    @property
    def carried_width(self) -> int:
        return self.streams.count * self.hidden_size

    def read_numbers(self, layer: int) -> int:
        """The window, and the compressed entries that are chosen or looked through."""
        window = min(self.window or self.context, self.context)
        numbers = window * self.attention.key_size
        kind = self.layer_kinds[layer]
        if kind == "window":
            return numbers
        entries = self.context // self.ratio_of(kind)
        if kind == "csa":
            numbers += entries * self.indexer.head_size
            entries = min(entries, self.indexer.entry_count_max)
        return numbers + entries * self.attention.key_size

    def is_float32(self, name: str) -> bool:
        return name.endswith(FLOAT32_ENDS)

    def is_integer(self, name: str) -> bool:
        return name.endswith(EXPERT_TABLE)

    def canonical_name(self, stored: str) -> str | None:
        """Published folders have no "model." before their names; transformers puts it there,
        and calls three of them otherwise. Layers that predict further tokens are not used.
        """
        name = stored.removeprefix("model.")
        if name.startswith("mtp."):
            return None
        if name in ("head.weight", HEAD):
            return HEAD
        if name == "embed.weight":
            name = "embed_tokens.weight"
        name = name.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")
        return f"model.{name}"

    def weight_shapes(self) -> Shapes:
        """Names are the published ones after "model.", but for embedding and head. Experts'
        w1 is the gate, w3 up and w2 down.
        """
        layers = [self._layer_shapes(layer) for layer in range(self.layer_count)]
        count, hidden = self.streams.count, self.hidden_size
        return decoder_shapes(self, layers) | {
            "model.hc_head_fn": (count, count * hidden),
            "model.hc_head_base": (count,),
            "model.hc_head_scale": (1,),
        }

    def _layer_shapes(self, layer: int) -> Shapes:
        hidden, heads, experts = self.hidden_size, self.attention, self.experts
        group_inputs = heads.output_width // self.output_group_count
        group_outputs = self.output_group_count * self.output_rank
        shapes: Shapes = {
            "attn_norm.weight": (hidden,),
            "attn.attn_sink": (heads.head_count,),
            "attn.wq_a.weight": (self.query_rank, hidden),
            "attn.q_norm.weight": (self.query_rank,),
            "attn.wq_b.weight": (heads.query_width, self.query_rank),
            "attn.wkv.weight": (heads.key_size, hidden),
            "attn.kv_norm.weight": (heads.key_size,),
            "attn.wo_a.weight": (group_outputs, group_inputs),
            "attn.wo_b.weight": (hidden, group_outputs),
        }
        kind = self.layer_kinds[layer]
        if kind != "window":
            shapes |= self._compressor_shapes("attn.compressor", kind, heads.key_size)
        if kind == "csa":
            sizes = self.indexer
            width = sizes.head_count * sizes.head_size
            shapes |= {
                "attn.indexer.wq_b.weight": (width, self.query_rank),
                "attn.indexer.weights_proj.weight": (sizes.head_count, hidden),
            }
            shapes |= self._compressor_shapes("attn.indexer.compressor", kind, sizes.head_size)
        shapes |= {
            "ffn_norm.weight": (hidden,),
            "ffn.gate.weight": (experts.count, hidden),
        }
        if self.layer_has_table[layer]:
            shapes[f"ffn{EXPERT_TABLE}"] = (self.vocab_size, experts.per_token)
        else:
            shapes["ffn.gate.bias"] = (experts.count,)
        for expert in (*(f"experts.{n}" for n in range(experts.count)), "shared_experts"):
            shapes |= {
                f"ffn.{expert}.w1.weight": (experts.width, hidden),
                f"ffn.{expert}.w2.weight": (hidden, experts.width),
                f"ffn.{expert}.w3.weight": (experts.width, hidden),
            }
        count = self.streams.count
        for block in ("attn", "ffn"):
            shapes |= {
                f"hc_{block}_fn": ((count + 2) * count, count * hidden),
                f"hc_{block}_base": ((count + 2) * count,),
                f"hc_{block}_scale": (3,),
            }
        return shapes

    def _compressor_shapes(self, prefix: str, kind: LayerKind, size: int) -> Shapes:
        width = SERIES[kind] * size
        return {
            f"{prefix}.ape": (self.ratio_of(kind), width),
            f"{prefix}.norm.weight": (size,),
            f"{prefix}.wgate.weight": (width, self.hidden_size),
            f"{prefix}.wkv.weight": (width, self.hidden_size),
        }
