"""How a time is spread over requests."""

import math
from collections.abc import Iterable

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """How a time is spread over the requests that have it, in microseconds."""

    count: int
    p50_us: int
    p95_us: int
    max_us: int


def spread(values: Iterable[int]) -> Spread | None:
    """Nearest-rank percentiles; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(
        count=len(ordered),
        p50_us=ordered[math.ceil(0.50 * len(ordered)) - 1],
        p95_us=ordered[math.ceil(0.95 * len(ordered)) - 1],
        max_us=ordered[-1],
    )
