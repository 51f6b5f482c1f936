"""What an operator can set of the scheduler's decisions. Times are in microseconds."""

import msgspec

from tidegate.kvcache.demand import Pace
from tidegate.kvcache.layout import Tokens


class CoreSettings(msgspec.Struct, frozen=True):
    """Settings of the core.

    `chunk_tokens` bounds the prompt tokens in one launch; None means no bound. `ahead_tokens`
    is how far decode rows may run beyond the position that the scheduler knows to be settled.
    """

    chunk_tokens: Tokens | None = Tokens(512)
    ahead_tokens: Tokens = Tokens(32)
    default_max_tokens: int = 1024
    waiting_count_max: int = 2048
    handoff_waiting_count_max: int = 16
    queue_timeout_us: int = 600_000_000
    stall_timeout_us: int = 120_000_000
    retry_after_ms: int = 1000
    poison_freed_pages: bool = False

    @property
    def pace(self) -> Pace:
        return Pace(self.chunk_tokens, chunks_in_flight=1, ahead=self.ahead_tokens)
