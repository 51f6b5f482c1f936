"""What an operator can set of the scheduler's decisions."""

import msgspec

from tidegate.kvcache.demand import Pace
from tidegate.kvcache.layout import Tokens

TENANT_WEIGHT_MIN = 1e-3
TENANT_WEIGHT_MAX = 1e6


class CoreSettings(msgspec.Struct, frozen=True):
    """Settings of the core. Raises `ValueError`, which names the field, for a bad value.

    `chunk_tokens` bounds the prompt tokens in one launch, and `mixed_chunk_tokens` those in a
    launch in which rows decode too; None means no bound. `chunks_in_flight` launches of them
    are with a worker, if there are pages for them; see `chunks`. `ahead_tokens` is how far
    decode rows run beyond the position that the scheduler knows to be settled, and
    `ahead_tokens_max` how far they may while there is plenty of room; see `run_ahead`.
    `waiting_count_max` and `waiting_tokens_max` bound the requests in the queue and the tokens
    of their prompts, `tenant_…` those of each tenant (None: only those of all count); see
    `overload`, which tells clients to come back after `retry_after_ms` at least, and after
    `retry_after_ms_max` at most. `handoff_waiting_count_max` bounds the finished prompts
    without a decode worker, above which no other prompt begins. `bypass_count_max` requests
    may go ahead of one that waits for pages, and may come to `bypass_tokens_max` charged tokens
    together; see `bypass`. For the queue's
    timeout see `deadlines`. A worker that owes an answer is suspect after `stall_timeout_us`,
    and fenced after `fence_timeout_us` more; see `losses`. `prefix_cache` keeps the pages of
    prompts on the workers that prefill, for prompts that begin alike. `early_handoff` moves
    a prompt's settled pages while its next chunk runs; see `early`. `tenant_weights` are
    shares of service while several tenants wait; a tenant that is not named has weight 1.
    """

    chunk_tokens: Tokens | None = Tokens(512)
    mixed_chunk_tokens: Tokens | None = Tokens(256)
    chunks_in_flight: int = 2
    ahead_tokens: Tokens = Tokens(32)
    ahead_tokens_max: Tokens = Tokens(256)
    default_max_tokens: int = 1024
    waiting_count_max: int = 2048
    waiting_tokens_max: int = 4 * 1024 * 1024
    tenant_waiting_count_max: int | None = None
    tenant_waiting_tokens_max: int | None = None
    handoff_waiting_count_max: int = 16
    bypass_count_max: int = 8
    bypass_tokens_max: int = 32_768
    queue_timeout_us: int = 600_000_000
    stall_timeout_us: int = 120_000_000
    fence_timeout_us: int = 30_000_000
    retry_after_ms: int = 1000
    retry_after_ms_max: int = 60_000
    poison_freed_pages: bool = False
    prefix_cache: bool = True
    early_handoff: bool = True
    tenant_weights: dict[str, float] = {}

    def __post_init__(self) -> None:
        for name in (
            "chunk_tokens",
            "mixed_chunk_tokens",
            "chunks_in_flight",
            "ahead_tokens",
            "ahead_tokens_max",
            "default_max_tokens",
            "waiting_count_max",
            "waiting_tokens_max",
            "tenant_waiting_count_max",
            "tenant_waiting_tokens_max",
            "handoff_waiting_count_max",
            "queue_timeout_us",
            "stall_timeout_us",
            "fence_timeout_us",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.ahead_tokens_max < self.ahead_tokens:
            raise ValueError(
                f"ahead_tokens_max must be at least ahead_tokens ({self.ahead_tokens}), "
                f"got {self.ahead_tokens_max}"
            )
        for tenant, weight in self.tenant_weights.items():
            if not TENANT_WEIGHT_MIN <= weight <= TENANT_WEIGHT_MAX:
                raise ValueError(
                    f"tenant_weights: the weight of {tenant!r} must be {TENANT_WEIGHT_MIN:g} "
                    f"to {TENANT_WEIGHT_MAX:g}, got {weight}"
                )
        for name in ("bypass_count_max", "bypass_tokens_max", "retry_after_ms"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if self.retry_after_ms_max < self.retry_after_ms:
            raise ValueError(
                f"retry_after_ms_max must be at least retry_after_ms ({self.retry_after_ms}), "
                f"got {self.retry_after_ms_max}"
            )

    @property
    def pace(self) -> Pace:
        return Pace(self.chunk_tokens, self.chunks_in_flight, ahead=self.ahead_tokens)
