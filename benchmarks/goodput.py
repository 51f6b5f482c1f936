"""Goodput: the share of all requests that were served within the limits on both times.

A request is *met* if its last token came, its time to first token (TTFT) was at most one limit
and its mean time for each token after the first (TPOT) at most the other. Whoever is refused,
times out or is not finished is not met.
"""

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise

import msgspec


class Ending(Enum):
    """What became of a request."""

    COMPLETE = "complete"
    REFUSED = "refused"  # At once, at the door.
    TIMED_OUT = "timed_out"  # In the queue: it never had a row.
    GIVEN_UP = "given_up"  # It could not make its client's own deadline, and ended for that.
    HUNG = "hung"  # It had a row and pages, made no progress, and timed out.
    ERROR = "error"


class Fate(msgspec.Struct):
    """One request's story in microseconds of virtual time. `ending` None: it is not over."""

    at_us: int
    output_tokens: int
    first_us: int | None = None
    last_us: int | None = None
    token_count: int = 0
    preemption_count: int = 0
    has_begun: bool = False
    ending: Ending | None = None

    @property
    def ttft_us(self) -> int | None:
        return None if self.first_us is None else self.first_us - self.at_us

    @property
    def tpot_us(self) -> float:
        """0 for a request with one token, which has no gap."""
        if self.first_us is None or self.last_us is None or self.token_count < 2:
            return 0.0
        return (self.last_us - self.first_us) / (self.token_count - 1)


class Limits(msgspec.Struct, frozen=True):
    ttft_us: float
    tpot_us: float

    def are_met(self, fate: Fate) -> bool:
        ttft_us = fate.ttft_us
        is_whole = fate.ending is Ending.COMPLETE and fate.token_count == fate.output_tokens
        return (
            is_whole
            and ttft_us is not None
            and ttft_us <= self.ttft_us
            and fate.tpot_us <= self.tpot_us
        )


class Score(msgspec.Struct, frozen=True):
    """Of one run. Counts are of requests; `goodput` and `…_share` are shares of all of them.

    `late_ttft` and `late_tpot` count those that finished, but beyond a limit; one that was
    beyond both counts for the first. Percentiles are of those that had a first token.
    """

    goodput: float
    count: int
    late_ttft: int
    late_tpot: int
    refused: int
    timed_out: int
    given_up: int
    hung: int
    errors: int
    preemptions: int
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float


def score(fates: Sequence[Fate], limits: Limits) -> Score:
    """Raises `ValueError` if there is no request."""
    if not fates:
        raise ValueError("goodput is a share of requests, and there is none")
    met = sum(limits.are_met(fate) for fate in fates)
    complete = [fate for fate in fates if fate.ending is Ending.COMPLETE]
    late_ttft = sum((fate.ttft_us or 0) > limits.ttft_us for fate in complete)

    def ended(ending: Ending) -> int:
        return sum(fate.ending is ending for fate in fates)

    ttfts = [fate.ttft_us / 1e3 for fate in fates if fate.ttft_us is not None]
    tpots = [fate.tpot_us / 1e3 for fate in fates if fate.token_count > 1]
    return Score(
        goodput=met / len(fates),
        count=len(fates),
        late_ttft=late_ttft,
        late_tpot=len(complete) - met - late_ttft,
        refused=ended(Ending.REFUSED),
        timed_out=ended(Ending.TIMED_OUT),
        given_up=ended(Ending.GIVEN_UP),
        hung=ended(Ending.HUNG),
        errors=ended(Ending.ERROR),
        preemptions=sum(fate.preemption_count for fate in fates),
        ttft_ms_p50=percentile(ttfts, 0.5),
        ttft_ms_p99=percentile(ttfts, 0.99),
        tpot_ms_p50=percentile(tpots, 0.5),
        tpot_ms_p99=percentile(tpots, 0.99),
    )


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed; 0 if there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def speed_at(goodputs: Sequence[tuple[float, float]], share: float) -> float | None:
    """The largest speed up to which goodput stays at `share` at least, between two that were
    tried by the logarithm of the speed.

    `goodputs` has (speed, goodput) in order of speed. None if the slowest one has less; the
    fastest if all have as much.
    """
    if not goodputs or goodputs[0][1] < share:
        return None
    for (slower, more), (faster, less) in pairwise(goodputs):
        if less < share:
            part = (more - share) / (more - less)
            return math.exp(math.log(slower) + part * math.log(faster / slower))
    return goodputs[-1][0]
