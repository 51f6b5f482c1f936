"""Loads a worker's model and makes its pools, and says how far it has come."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tidegate.engine.checkpoint.card import build_card
from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.weights import load_weights
from tidegate.engine.models.registry import Model, build_model, layout_for
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import Fingerprint, ModelCard, Role
from tidegate.kvcache.demand import Leg, Pace
from tidegate.kvcache.layout import DTYPE_BYTES, Layout, Tokens
from tidegate.kvcache.page_store import TORCH_DTYPES, PageStore
from tidegate.kvcache.sizer import PoolSettings, SizedPools, SizeError, size_pools

# What each role runs of a request. A prefill worker runs one-token requests whole.
LEGS: dict[Role, tuple[Leg, ...]] = {
    Role.PREFILL: (Leg.SOURCE, Leg.WHOLE),
    Role.DECODE: (Leg.TARGET,),
    Role.BOTH: (Leg.WHOLE,),
}
GPU_MEMORY_SHARE = 0.92  # Of a GPU's free memory; the rest is for its allocator's rounding.
PROGRESS_INTERVAL_S = 1.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model on its device, and pools of its layout."""

    card: ModelCard
    fingerprint: Fingerprint
    layout: Layout
    model: Model
    store: PageStore
    pools: SizedPools


def load_engine(settings: WorkerSettings, say: Say) -> LoadedEngine:
    """Load everything that `settings` name; `say` is called with a line for each step.

    Raises `CheckpointError`, `LayoutError`, `SizeError`, or `OSError` for want of memory.
    """
    begin = time.monotonic()
    checkpoint = open_checkpoint(settings.model, settings.chat_template)
    config = checkpoint.config
    layout = layout_for(config, settings.page_tokens, settings.dtype)
    layout = layout.with_forced_flag(settings.swa_only_transfer)
    say(f"reading {config.name}: {config.layer_count} layers, {config.family} family")
    card = build_card(checkpoint)
    weights = load_weights(checkpoint, TORCH_DTYPES[settings.dtype], _progress_of_weights(say))
    model = build_model(config, weights, settings.device, settings.dtype)
    pools = size_pools(layout, _pool_settings(settings, config))
    for warning in pools.warnings:
        say(f"warning: {warning}")
    store = PageStore(layout, pools.page_counts, settings.device)
    say(f"loaded in {time.monotonic() - begin:.1f} s on {settings.device}, {settings.dtype}")
    return LoadedEngine(
        card=card,
        fingerprint=Fingerprint(checkpoint.fingerprint, settings.dtype, layout),
        layout=layout,
        model=model,
        store=store,
        pools=pools,
    )


def workspace_bytes(settings: WorkerSettings, config: ModelConfig) -> int:
    """Memory that a launch uses beside weights and pools: a generous guess."""
    tokens = (settings.chunk_tokens or config.context) + settings.max_running
    heads = (config.head_count + 2 * config.kv_head_count) * config.head_dim
    # Residual, norm and their float32 copies; queries, keys, values; gate, up, product.
    per_token = 4 * (4 * config.hidden_size + 3 * heads + 3 * config.intermediate_size)
    # Keys and values of one layer, gathered for all rows.
    per_position = 2 * config.kv_head_count * config.head_dim
    gathered = settings.max_running * config.context * per_position
    logits = 4 * settings.max_running * config.vocab_size * 4
    return tokens * per_token + gathered * DTYPE_BYTES[settings.dtype] + logits


def _pool_settings(settings: WorkerSettings, config: ModelConfig) -> PoolSettings:
    def tokens(count: int | None) -> Tokens | None:
        return None if count is None else Tokens(count)

    kv_memory = settings.kv_memory
    if kv_memory is None and settings.device.startswith("cuda"):
        kv_memory = _free_gpu_memory(settings, config)
    return PoolSettings(
        kv_memory=kv_memory,
        full_pool_tokens=tokens(settings.full_pool_tokens),
        window_pool_tokens=tokens(settings.window_pool_tokens),
        max_running=settings.max_running,
        pace=Pace(
            tokens(settings.chunk_tokens),
            chunks_in_flight=1,
            ahead=Tokens(settings.ahead_tokens),
        ),
        context=Tokens(config.context),
        legs=LEGS[settings.role],
    )


def _free_gpu_memory(settings: WorkerSettings, config: ModelConfig) -> int:
    free, _ = torch.cuda.mem_get_info(settings.device)
    memory = int(free * GPU_MEMORY_SHARE) - workspace_bytes(settings, config)
    if memory <= 0:
        raise SizeError(
            f"--device {settings.device}: {free} bytes are free beside the weights, and a "
            f"launch uses {workspace_bytes(settings, config)}: lower --chunk-tokens or "
            "--max-running"
        )
    return memory


def _progress_of_weights(say: Say) -> Callable[[int, int], None]:
    next_at = time.monotonic() + PROGRESS_INTERVAL_S

    def progress(done: int, count: int) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + PROGRESS_INTERVAL_S
            say(f"loading weights, {100 * done // count} %")

    return progress
