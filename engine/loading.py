"""Loads a worker's model and makes its pools, and says how far it has come."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tidegate.engine.checkpoint.card import build_card
from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.weights import load_weights
from tidegate.engine.models.layouts import layout_for
from tidegate.engine.models.registry import Model, build_model
from tidegate.engine.pools import pool_settings, workspace_bytes
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import Fingerprint, ModelCard
from tidegate.kvcache.layout import Layout
from tidegate.kvcache.page_store import TORCH_DTYPES, PageStore
from tidegate.kvcache.sizer import SizedPools, SizeError, size_pools

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
    for note in checkpoint.notes:
        say(f"note: {note}")
    card = build_card(checkpoint)
    weights = load_weights(checkpoint, TORCH_DTYPES[settings.dtype], _progress_of_weights(say))
    model = build_model(config, weights, settings.device, settings.dtype)
    pools = size_pools(layout, pool_settings(settings, config, _kv_memory(settings, config)))
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


def _kv_memory(settings: WorkerSettings, config: ModelConfig) -> int | None:
    if settings.kv_memory is None and settings.device.startswith("cuda"):
        return _free_gpu_memory(settings, config)
    return settings.kv_memory


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
