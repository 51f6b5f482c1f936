"""Reads the config.json of a DeepSeek V4 model, as published or as transformers writes it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tidegate.engine.checkpoint.config import COUNT_MAX, AttentionShape
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.deepseek_v4 import (
    DeepSeekV4Config,
    IndexerSizes,
    LayerKind,
    RoutedExperts,
    Scoring,
    Streams,
)
from tidegate.engine.checkpoint.hf_fields import (
    HfFields,
    HfRope,
    ids,
    only,
    rope_from_hf,
    within,
)
from tidegate.engine.checkpoint.rope import Rope
from tidegate.engine.checkpoint.small_file import read_json

KINDS: dict[str, LayerKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
# What published files have in place of `layer_types`: 0 stands for no compressed entries.
KINDS_BY_RATIO: dict[int, LayerKind] = {0: "window", 4: "csa", 128: "hca"}
HAS_TABLE = {"hash_moe": True, "moe": False}
SCORINGS: tuple[Scoring, ...] = ("sqrtsoftplus", "sigmoid", "softmax")
Key = TypeVar("Key", str, int)
Meaning = TypeVar("Meaning")

ROTATED_SHARE = 0.125  # Of a head, where the file does not say.


class _Ropes(HfRope):
    """Rotations of window layers and of the others, or the latter's alone."""

    main: HfRope | None = None
    compress: HfRope | None = None


class _DeepSeekV4(HfFields, kw_only=True):
    vocab_size: int = 129_280
    hidden_size: int = 4096
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    q_lora_rank: int = 1024
    num_experts_per_tok: int = 6
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    max_position_embeddings: int = 1_048_576
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    rope_parameters: _Ropes | None = None
    rope_scaling: _Ropes | None = None
    partial_rotary_factor: float | None = None
    qk_rope_head_dim: int | None = None
    layer_types: list[str] | None = None
    compress_ratios: list[int] | None = None
    compress_rates: dict[str, int] | None = None
    compress_rate_csa: int | None = None
    compress_rate_hca: int | None = None
    mlp_layer_types: list[str] | None = None
    num_hash_layers: int = 3
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    swiglu_limit: float = 10.0
    sliding_window: int = 128
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1


def deepseek_v4_from_hf(path: Path, name: str, eos_ids: tuple[int, ...]) -> DeepSeekV4Config:
    """A `quantization_config` is no obstacle here: the weights' reader refuses what it cannot
    read, and plans need no weights.
    """
    source = read_json(path, _DeepSeekV4)
    source.check()
    only("hidden_act", source.hidden_act, "silu")
    only("attention_bias", source.attention_bias, False)
    only("mlp_bias", source.mlp_bias, False)
    only("norm_topk_prob", source.norm_topk_prob, True)
    only("num_key_value_heads", source.num_key_value_heads, 1)
    only("n_shared_experts", source.n_shared_experts, 1)
    within("head_dim", source.head_dim, COUNT_MAX)
    kinds = _layer_kinds(source)
    rates = RATES | (source.compress_rates or {})
    csa, hca = rates["compressed_sparse_attention"], rates["heavily_compressed_attention"]
    rope, rope_window = _ropes(source)
    return DeepSeekV4Config(
        name=name,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        layer_count=source.num_hidden_layers,
        norm_eps=source.rms_norm_eps,
        window=source.sliding_window,
        layer_is_window=tuple(kind == "window" for kind in kinds),
        tie_embeddings=source.tie_word_embeddings,
        context=source.max_position_embeddings,
        bos_id=source.bos_token_id,
        eos_ids=eos_ids or ids(source.eos_token_id),
        attention=AttentionShape(
            head_count=source.num_attention_heads,
            kv_head_count=1,
            key_size=source.head_dim,
            value_size=source.head_dim,
        ),
        query_rank=source.q_lora_rank,
        output_group_count=source.o_groups,
        output_rank=source.o_lora_rank,
        layer_kinds=kinds,
        csa_ratio=csa if source.compress_rate_csa is None else source.compress_rate_csa,
        hca_ratio=hca if source.compress_rate_hca is None else source.compress_rate_hca,
        indexer=IndexerSizes(
            head_count=source.index_n_heads,
            head_size=source.index_head_dim,
            entry_count_max=source.index_topk,
        ),
        layer_has_table=_layer_has_table(source),
        experts=RoutedExperts(
            count=source.n_routed_experts,
            per_token=source.num_experts_per_tok,
            width=source.moe_intermediate_size,
            scoring=_scoring(source),
            factor=source.routed_scaling_factor,
            limit=source.swiglu_limit,
        ),
        streams=Streams(
            count=source.hc_mult,
            round_count=source.hc_sinkhorn_iters,
            eps=source.hc_eps,
        ),
        rope=rope,
        rope_window=rope_window,
    )


def _scoring(source: _DeepSeekV4) -> Scoring:
    for scoring in SCORINGS:
        if source.scoring_func == scoring:
            return scoring
    raise CheckpointError(
        f"scoring_func is {source.scoring_func}: supported are {', '.join(SCORINGS)}"
    )


def _layer_kinds(source: _DeepSeekV4) -> tuple[LayerKind, ...]:
    """What the file says of its layers; by default two HCA layers, then HCA and CSA in turn.

    Entries past the last layer are those of layers that predict further tokens.
    """
    count = source.num_hidden_layers
    if source.layer_types is not None:
        return _named("layer_types", source.layer_types, KINDS, count)
    if source.compress_ratios is not None:
        return _named("compress_ratios", source.compress_ratios, KINDS_BY_RATIO, count)
    return tuple("csa" if n >= 2 and n % 2 == 1 else "hca" for n in range(count))


def _named(
    field: str, values: Sequence[Key], meanings: Mapping[Key, Meaning], count: int
) -> tuple[Meaning, ...]:
    """What the values of the first `count` layers mean."""
    for value in values[:count]:
        if value not in meanings:
            supported = ", ".join(map(str, meanings))
            raise CheckpointError(f"{field} has {value}: supported are {supported}")
    if len(values) < count:
        raise CheckpointError(
            f"{field} has {len(values)} entries: must have one for each of the {count} layers"
        )
    return tuple(meanings[value] for value in values[:count])


def _layer_has_table(source: _DeepSeekV4) -> tuple[bool, ...]:
    count = source.num_hidden_layers
    if source.mlp_layer_types is None:
        return tuple(n < source.num_hash_layers for n in range(count))
    return _named("mlp_layer_types", source.mlp_layer_types, HAS_TABLE, count)


def _ropes(source: _DeepSeekV4) -> tuple[Rope, Rope]:
    """The rotation of layers with compressed entries, and that of window layers.

    A scaling that is not given for either concerns the former alone. YaRN there multiplies
    nothing with its attention factor unless the file names one.
    """
    field = "rope_parameters" if source.rope_parameters is not None else "rope_scaling"
    given = source.rope_parameters or source.rope_scaling or _Ropes()
    share = source.partial_rotary_factor
    if share is None:
        rotated = source.qk_rope_head_dim
        share = ROTATED_SHARE if rotated is None else rotated / source.head_dim
    if given.main is not None and given.compress is not None:
        main, compress = given.main, given.compress
        fields = f"{field}.compress", f"{field}.main"
    else:
        kind = given.rope_type or given.type
        factor = given.attention_factor
        own = {field: getattr(given, field) for field in HfRope.__struct_fields__}
        own["rope_theta"] = source.compress_rope_theta
        own["attention_factor"] = 1.0 if kind == "yarn" and factor is None else factor
        compress = HfRope(**own)
        main = HfRope(rope_theta=source.rope_theta)
        fields = field, "rope_theta"

    def rope(name: str, own: HfRope, theta: float) -> Rope:
        if own.partial_rotary_factor is None:
            own = msgspec.structs.replace(own, partial_rotary_factor=share)
        context = source.max_position_embeddings
        return rope_from_hf(name, own, source.head_dim, context, theta=theta)

    return (
        rope(fields[0], compress, source.compress_rope_theta),
        rope(fields[1], main, source.rope_theta),
    )
