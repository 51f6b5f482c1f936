"""What `tidegate plan` finds out: memory, pools, the flag, and what fits, as plain facts.

Beside the server that would run, the same memory in two others: one that caps prompts by its
window pool, and one that keeps a full cache for every layer.
"""

from collections.abc import Sequence

import msgspec

from tidegate.cli.reach_text import reads_text
from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.tensor_names import weight_bytes
from tidegate.engine.models.layouts import flag_reason, layout_for
from tidegate.engine.pools import LEGS, pool_settings, workspace_bytes
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import Role
from tidegate.kvcache.capacity import (
    AtOnce,
    Limit,
    PlannedWorker,
    Server,
    at_once,
    longest,
    refused_by,
    window_cap,
    without_windows,
)
from tidegate.kvcache.demand import Leg, Lengths
from tidegate.kvcache.geometry import geometry
from tidegate.kvcache.layout import DTYPE_BYTES, All, Layout, Pages, Tokens
from tidegate.kvcache.sizer import (
    PoolSettings,
    SizedPools,
    SizeError,
    pool_sizes,
    size_pools,
)

DEFAULT_LENGTHS = ((1000, 200), (8000, 500), (30_000, 1000))

OURS = "tidegate"
WINDOW_CAP = "capped by the window pool"
FULL_CACHE = "a full cache for every layer"


class Size(msgspec.Struct, frozen=True):
    """A request's size in tokens."""

    prompt: int
    max_tokens: int


class PoolFacts(msgspec.Struct, frozen=True):
    """One pool of one worker. `reads` says how far back its layers read; `window_tokens` is
    None unless they have a window.
    """

    name: str
    reads: str
    window_tokens: int | None
    bytes_per_token: int
    page_tokens: int
    page_count: int
    token_count: int
    byte_count: int


class WorkerFacts(msgspec.Struct, frozen=True):
    """A worker's pools, and the flag in force on it: None where it does not apply."""

    role: str
    swa_only_transfer: bool | None
    reason: str
    pools: tuple[PoolFacts, ...]
    warnings: tuple[str, ...]


class LongestPrompt(msgspec.Struct, frozen=True):
    """The longest prompt with this `max_tokens`, 0 if none, and what refuses a longer one."""

    max_tokens: int
    tokens: int
    limit: Limit


class SizeFacts(msgspec.Struct, frozen=True):
    """How many requests of a size run at once on each worker, or what refuses every one."""

    size: Size
    refused_by: Limit | None
    workers: tuple[AtOnce, ...]


class ServerFacts(msgspec.Struct, frozen=True):
    name: str
    assumption: str
    longest_prompts: tuple[LongestPrompt, ...]
    at_once: tuple[SizeFacts, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `kv_memory`, `weight_bytes` and the rest are of each worker."""

    model: str
    family: str
    layer_count: int
    context: int
    dtype: str
    page_tokens: int
    chunk_tokens: int | None
    ahead_tokens: int
    max_running: int
    kv_memory: int | None
    weight_bytes: int
    workspace_bytes: int
    workers: tuple[WorkerFacts, ...]
    servers: tuple[ServerFacts, ...]


def make_plan(
    config: ModelConfig,
    workers: Sequence[WorkerSettings],
    max_tokens: Sequence[int],
    sizes: Sequence[Size],
) -> Plan:
    """The plan for one worker of each of these settings, which differ in the role only.

    Raises `LayoutError` for a flag that cannot be forced, and `SizeError` where a pool does
    not hold one request.
    """
    first = workers[0]
    declared = layout_for(config, first.page_tokens, first.dtype)
    layout = declared.with_forced_flag(first.swa_only_transfer)
    needs = [pool_settings(settings, config, settings.kv_memory) for settings in workers]
    sized = [size_pools(layout, each) for each in needs]
    ours = _server(layout, workers, needs, [pools.page_counts for pools in sized])
    return Plan(
        model=config.name,
        family=config.family,
        layer_count=config.layer_count,
        context=config.context,
        dtype=first.dtype,
        page_tokens=first.page_tokens,
        chunk_tokens=first.chunk_tokens,
        ahead_tokens=first.ahead_tokens,
        max_running=first.max_running,
        kv_memory=first.kv_memory,
        weight_bytes=weight_bytes(config, DTYPE_BYTES[first.dtype]),
        workspace_bytes=workspace_bytes(first, config),
        workers=tuple(
            _worker_facts(config, declared, layout, settings, pools)
            for settings, pools in zip(workers, sized, strict=True)
        ),
        servers=tuple(
            ServerFacts(
                name,
                assumption,
                tuple(_longest_prompt(server, output) for output in max_tokens),
                tuple(_size_facts(server, size) for size in sizes),
            )
            for name, assumption, server in (
                (OURS, _our_assumption(ours), ours),
                _capped(ours),
                _full_cache(ours, workers, needs),
            )
        ),
    )


def default_sizes(context: int) -> tuple[Size, ...]:
    """A few sizes that the model's context allows."""
    sizes = (Size(*pair) for pair in DEFAULT_LENGTHS)
    fitting = tuple(size for size in sizes if _lengths(size).end <= context)
    return fitting or (Size(max(1, context // 2), max(1, context // 4)),)


def _server(
    layout: Layout,
    workers: Sequence[WorkerSettings],
    needs: Sequence[PoolSettings],
    page_counts: Sequence[tuple[Pages, ...]],
) -> Server:
    return Server(
        layout=layout,
        workers=tuple(
            PlannedWorker(settings.role.value, LEGS[settings.role], counts)
            for settings, counts in zip(workers, page_counts, strict=True)
        ),
        context=needs[0].context,
        row_count=needs[0].max_running,
        pace=needs[0].pace,
    )


def _our_assumption(server: Server) -> str:
    if window_cap(server) is None:
        return "no layer has a window"
    has_handoff = any(Leg.SOURCE in worker.legs for worker in server.workers)
    has_full = any(isinstance(group.reach, All) for group in server.layout.groups)
    is_rolling = server.layout.swa_only_transfer or not has_handoff
    if not has_full:
        if is_rolling:
            return "there is no full pool: the model's context alone bounds a prompt"
        return "a prompt that is handed over is bounded by the window pool: the flag is false"
    if is_rolling:
        return "the full pool alone bounds a prompt; the window pool never refuses one"
    return "a prompt that is handed over is bounded by the window pool too: the flag is false"


def _capped(ours: Server) -> tuple[str, str, Server]:
    cap = window_cap(ours)
    assumption = (
        "no window pool, so nothing is capped"
        if cap is None
        else "the same pools and needs, but every prompt longer than the smallest window pool "
        f"({cap[1]:,} tokens, {cap[0].worker} worker) is refused"
    )
    return WINDOW_CAP, assumption, msgspec.structs.replace(ours, is_capped_by_window=True)


def _full_cache(
    ours: Server, workers: Sequence[WorkerSettings], needs: Sequence[PoolSettings]
) -> tuple[str, str, Server]:
    layout = without_windows(ours.layout)
    page_counts: list[tuple[Pages, ...]] = []
    for worker, need in zip(ours.workers, needs, strict=True):
        memory = need.kv_memory
        if memory is None or need.full_pool_tokens or need.window_pool_tokens:
            # Pools that are fixed in tokens take what they take; the other gets as much.
            memory = geometry(ours.layout, worker.page_counts).byte_count
        try:
            sized = size_pools(
                layout,
                msgspec.structs.replace(
                    need, kv_memory=memory, full_pool_tokens=None, window_pool_tokens=None
                ),
            )
            page_counts.append(sized.page_counts)
        except SizeError:
            page_counts.append((Pages(0),) * len(layout.groups))
    full = layout.groups[0]
    held = min(full.start_of(counts[0]) for counts in page_counts)
    assumption = (
        f"no window pool: every layer keeps every position, {full.bytes_per_token:,} bytes a "
        f"token, in one pool of the same memory ({held:,} tokens)"
    )
    return FULL_CACHE, assumption, _server(layout, workers, needs, page_counts)


def _worker_facts(
    config: ModelConfig,
    declared: Layout,
    layout: Layout,
    settings: WorkerSettings,
    pools: SizedPools,
) -> WorkerFacts:
    flag, reason = _flag(config, declared, layout, settings.role)
    return WorkerFacts(
        role=settings.role.value,
        swa_only_transfer=flag,
        reason=reason,
        pools=tuple(
            PoolFacts(
                size.name,
                reads_text(group.reach),
                group.window_tokens,
                group.bytes_per_token,
                size.page_tokens,
                size.page_count,
                size.token_count,
                size.byte_count,
            )
            for group, size in zip(
                layout.groups, pool_sizes(layout, pools.page_counts), strict=True
            )
        ),
        warnings=pools.warnings,
    )


def _flag(
    config: ModelConfig, declared: Layout, layout: Layout, role: Role
) -> tuple[bool | None, str]:
    """The flag in force on a worker of this role, and why."""
    if declared.swa_only_transfer is None:
        return None, flag_reason(config.family, declared)
    if role is Role.BOTH:
        return None, "a worker of role both hands nothing over"
    if layout.swa_only_transfer != declared.swa_only_transfer:
        return (
            layout.swa_only_transfer,
            "forced by --swa-only-transfer; the model declares true",
        )
    return layout.swa_only_transfer, flag_reason(config.family, declared)


def _longest_prompt(server: Server, output: int) -> LongestPrompt:
    found = longest(server, Tokens(output))
    return LongestPrompt(output, found.tokens, found.limit)


def _size_facts(server: Server, size: Size) -> SizeFacts:
    lengths = _lengths(size)
    refusal = refused_by(server, lengths)
    return SizeFacts(size, refusal, () if refusal else at_once(server, lengths))


def _lengths(size: Size) -> Lengths:
    return Lengths(Tokens(size.prompt), Tokens(size.max_tokens))
