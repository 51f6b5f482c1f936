"""How fast something goes, of late: the speed of a queue."""

import math

HALF_LIFE_US = 10_000_000  # What was so long ago counts half.
SPAN_US_MIN = 1_000  # Of a shorter time nothing can be told.
_LN2 = math.log(2)


class Rate:
    """Amounts noted with their times, which do not go backwards; older ones count less."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._since_us: int | None = None
        self._at_us = 0

    def note(self, amount: int, now_us: int) -> None:
        if self._since_us is None:
            self._since_us = self._at_us = now_us
        self._amount = self._decayed(now_us) + amount
        self._at_us = now_us

    def per_second(self, now_us: int) -> float | None:
        """None if nothing has ever been noted."""
        if self._since_us is None:
            return None
        span_us = max(SPAN_US_MIN, now_us - self._since_us)
        # What an amount of 1 in each microsecond of the span would have come to.
        weight_us = HALF_LIFE_US / _LN2 * (1 - _half_of(span_us))
        return self._decayed(now_us) / weight_us * 1e6

    def _decayed(self, now_us: int) -> float:
        return self._amount * _half_of(now_us - self._at_us)


def _half_of(span_us: int) -> float:
    """What a time ago still counts."""
    return math.exp(-_LN2 * span_us / HALF_LIFE_US)
