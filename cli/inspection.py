"""What `tidegate inspect` finds out of a checkpoint: its KV layout, and what a memory holds."""

from collections.abc import Sequence

import msgspec

from tidegate.cli.planning import DEFAULT_LENGTHS, OURS, WINDOW_CAP, Plan, make_plan
from tidegate.cli.reach_text import query_reads_text, reach_tag
from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.models.layouts import flag_reason, layout_for
from tidegate.engine.settings import WorkerSettings
from tidegate.kvcache.capacity import handoff_bytes
from tidegate.kvcache.demand import longest_residency
from tidegate.kvcache.layout import All, Group, Layout, Tokens


class TensorFacts(msgspec.Struct, frozen=True):
    """A kind of tensor that some layers keep, an entry of `shape` per `tokens_per_entry`."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    tokens_per_entry: int
    layers: tuple[int, ...]


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A group of layers that share a pool. Layers are counted from 0.

    `reach` is "all", "window" or "tail". `window_tokens` is None unless it is a window: the
    query itself and the positions before it that it reads.

    `kept_bytes_max` is the most that later tokens read of a request's earlier ones, however
    long it is, and `kept_page_bytes_max` the most of whole pages in a step of one token. Both
    are None for a pool that keeps everything.
    """

    pool: str
    reach: str
    reads: str
    window_tokens: int | None
    layers: tuple[int, ...]
    tensors: tuple[TensorFacts, ...]
    bytes_per_token: int
    page_tokens: int
    page_bytes: int
    kept_bytes_max: int | None
    kept_page_bytes_max: int | None


class HandoffFacts(msgspec.Struct, frozen=True):
    """Bytes that the hand-off of a prompt moves, under the model's own flag and under false.

    `bytes_if_false` is None for a model without window layers.
    """

    prompt: int
    bytes_as_declared: int
    bytes_if_false: int | None


class CapRefusal(msgspec.Struct, frozen=True):
    """Prompts that run here with so many new tokens, and that a server which caps prompts by
    its window pool refuses: from `shortest` to `longest` tokens.
    """

    max_tokens: int
    shortest: int
    longest: int


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `layers_without_kv` read what an earlier layer keeps.

    `plan` is what `tidegate plan --json` prints; it is None, and there is nothing to refuse,
    where no memory is given. `notes` say what is out of the way in how the checkpoint is read.
    """

    model: str
    family: str
    layer_count: int
    context: int
    vocab_size: int
    has_weights: bool
    notes: tuple[str, ...]
    dtype: str
    swa_only_transfer: bool | None
    reason: str
    window_tokens: int | None
    groups: tuple[GroupLayout, ...]
    layers_without_kv: tuple[int, ...]
    handoffs: tuple[HandoffFacts, ...]
    plan: Plan | None
    refused_by_window_cap: tuple[CapRefusal, ...]


def inspect(
    config: ModelConfig,
    workers: Sequence[WorkerSettings],
    max_tokens: Sequence[int],
    *,
    has_weights: bool,
    notes: Sequence[str] = (),
) -> Inspection:
    """The facts of a model, with pools of workers of these settings if they say how large.

    Raises what `make_plan` raises.
    """
    first = workers[0]
    layout = layout_for(config, first.page_tokens, first.dtype)
    sizes = (first.kv_memory, first.full_pool_tokens, first.window_pool_tokens)
    plan = None
    if any(size is not None for size in sizes):
        plan = make_plan(config, workers, max_tokens, ())
    owners = {spec.layer for group in layout.groups for spec in group.tensors}
    return Inspection(
        model=config.name,
        family=config.family,
        layer_count=config.layer_count,
        context=config.context,
        vocab_size=config.vocab_size,
        has_weights=has_weights,
        notes=tuple(notes),
        dtype=first.dtype,
        swa_only_transfer=layout.swa_only_transfer,
        reason=flag_reason(config.family, layout),
        window_tokens=config.window,
        groups=tuple(_group_layout(group) for group in layout.groups),
        layers_without_kv=tuple(n for n in range(config.layer_count) if n not in owners),
        handoffs=_handoffs(layout, config.context),
        plan=plan,
        refused_by_window_cap=() if plan is None else _refused_by_cap(plan),
    )


def _group_layout(group: Group) -> GroupLayout:
    kinds: dict[tuple[str, tuple[int, ...], str, int], list[int]] = {}
    for spec in group.tensors:
        kind = spec.name.partition(".")[0]
        key = (kind, spec.shape, spec.dtype, spec.tokens_per_entry)
        kinds.setdefault(key, []).append(spec.layer)
    return GroupLayout(
        pool=group.name,
        reach=reach_tag(group.reach),
        reads=query_reads_text(group.reach),
        window_tokens=group.window_tokens,
        layers=tuple(sorted({spec.layer for spec in group.tensors})),
        tensors=tuple(TensorFacts(*key, tuple(layers)) for key, layers in kinds.items()),
        bytes_per_token=group.bytes_per_token,
        page_tokens=group.page_tokens,
        page_bytes=group.page_bytes,
        kept_bytes_max=group.kept_bytes_max,
        kept_page_bytes_max=_kept_page_bytes_max(group),
    )


def _kept_page_bytes_max(group: Group) -> int | None:
    if isinstance(group.reach, All):
        return None
    pages = longest_residency(group.reach, group.page_tokens, ahead=Tokens(1))
    return pages * group.page_bytes


def _handoffs(layout: Layout, context: int) -> tuple[HandoffFacts, ...]:
    """For a few prompts that the context allows, and the longest with a token to follow."""
    prompts = [prompt for prompt, _ in DEFAULT_LENGTHS if prompt < context - 1]
    if context > 1:
        prompts.append(context - 1)
    forced = None
    if layout.swa_only_transfer is not None:
        forced = layout.with_forced_flag(False)
    return tuple(
        HandoffFacts(
            prompt,
            handoff_bytes(layout, Tokens(prompt)),
            None if forced is None else handoff_bytes(forced, Tokens(prompt)),
        )
        for prompt in prompts
    )


def _refused_by_cap(plan: Plan) -> tuple[CapRefusal, ...]:
    by_name = {server.name: server for server in plan.servers}
    pairs = zip(by_name[OURS].longest_prompts, by_name[WINDOW_CAP].longest_prompts, strict=True)
    return tuple(
        CapRefusal(ours.max_tokens, capped.tokens + 1, ours.tokens)
        for ours, capped in pairs
        if capped.tokens < ours.tokens
    )
