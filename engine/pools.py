"""A worker's memory beside its weights: what its pools depend on, and what a launch uses.

Importing this loads no torch, so the planner can use it too.
"""

from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import Role
from tidegate.kvcache.demand import Leg, Pace
from tidegate.kvcache.layout import DTYPE_BYTES, Tokens
from tidegate.kvcache.sizer import PoolSettings

# What each role runs of a request. A prefill worker runs one-token requests whole.
LEGS: dict[Role, tuple[Leg, ...]] = {
    Role.PREFILL: (Leg.SOURCE, Leg.WHOLE),
    Role.DECODE: (Leg.TARGET,),
    Role.BOTH: (Leg.WHOLE,),
}


def pool_settings(
    settings: WorkerSettings, config: ModelConfig, kv_memory: int | None
) -> PoolSettings:
    """What the sizes of a worker's pools depend on, with `kv_memory` bytes for them all."""

    def tokens(count: int | None) -> Tokens | None:
        return None if count is None else Tokens(count)

    return PoolSettings(
        kv_memory=kv_memory,
        full_pool_tokens=tokens(settings.full_pool_tokens),
        window_pool_tokens=tokens(settings.window_pool_tokens),
        max_running=settings.max_running,
        pace=Pace(
            tokens(settings.chunk_tokens),
            chunks_in_flight=1,  # The next one takes what is free; see `scheduler/chunks.py`.
            ahead=Tokens(settings.ahead_tokens),
        ),
        context=Tokens(config.context),
        legs=LEGS[settings.role],
    )


def workspace_bytes(settings: WorkerSettings, config: ModelConfig) -> int:
    """Memory that a launch uses beside weights and pools: a generous guess."""
    tokens = (settings.chunk_tokens or config.context) + settings.max_running
    shapes = [config.attention_of(layer) for layer in range(config.layer_count)]
    heads = max(shape.query_width + shape.key_width + shape.value_width for shape in shapes)
    # Residual, norm and their float32 copies; queries, keys, values; gate, up, product; what
    # is carried along, and its making.
    widths = 4 * config.hidden_size + 3 * heads + 3 * config.mlp_width
    per_token = 4 * (widths + 3 * config.carried_width)
    # Keys and values of one layer, of the positions that it reads, gathered for all rows.
    per_row = max(config.read_numbers(layer) for layer in range(config.layer_count))
    gathered = settings.max_running * per_row
    logits = 4 * settings.max_running * config.vocab_size * 4
    return tokens * per_token + gathered * DTYPE_BYTES[settings.dtype] + logits
