"""How fast a worker runs prompts, at its best of late: what is too late anyway is not begun.

Only launches with at least half of a chunk's budget tell: what a small one takes is mostly not
for its tokens. Without a budget nothing is told, as a launch may be of any size.
"""

from collections import deque

from tidegate.kvcache.layout import Tokens

SAMPLE_COUNT_MAX = 16
# Nobody is given up who is late only at the speed that was measured: it may have been slowed
# down by rows that decode, by a long context, or by a launch that was half empty.
MARGIN = 2


class PrefillSpeed:
    """The speed of one worker. `chunk` is the budget of a launch, or None without one."""

    def __init__(self, chunk: Tokens | None) -> None:
        self._chunk = chunk
        self._us_per_token: deque[float] = deque(maxlen=SAMPLE_COUNT_MAX)

    def note(self, tokens: int, busy_us: int) -> None:
        """A launch with so many prompt tokens took so long; 0 if that is not known."""
        if self._chunk is not None and busy_us > 0 and 2 * tokens >= self._chunk:
            self._us_per_token.append(busy_us / tokens)

    def least_us(self, tokens: int) -> int:
        """A time in which so many prompt tokens will not be run; 0 if nothing is known."""
        if not self._us_per_token:
            return 0
        return int(tokens * min(self._us_per_token) / MARGIN)
