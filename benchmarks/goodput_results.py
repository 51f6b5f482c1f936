"""What a run of the goodput benchmark found, as it is written, printed and told as figures."""

import re

import msgspec

from goodput import Score, speed_at

KEPT_SHARE = 0.9  # Of the requests, that the headline speed still serves within the limits.


class Point(msgspec.Struct, frozen=True):
    """`busy_share_max` is that of the worker that was busiest, until the last ending."""

    speed: float
    score: Score
    busy_share_max: float


class Curve(msgspec.Struct, frozen=True):
    fleet: str
    door: str
    points: list[Point]

    @property
    def speed_kept(self) -> float | None:
        """The largest speed with `KEPT_SHARE` of goodput; None if there is none."""
        return speed_at([(p.speed, p.score.goodput) for p in self.points], KEPT_SHARE)


class TraceResult(msgspec.Struct):
    """`pool_tokens` has the tokens of each pool of a worker of role both."""

    trace: str
    request_count: int
    seconds: float
    kv_mib: int
    ttft_ms: float
    pool_tokens: dict[str, int]
    curves: list[Curve] = []


class Results(msgspec.Struct):
    cost_factor: float
    tpot_ms: float
    patience_ms: float
    traces: list[TraceResult] = []


def figures_of(results: Results) -> dict[str, float | None]:
    """The headline speed of each curve, and its goodput at each speed."""
    figures: dict[str, float | None] = {}
    for result in results.traces:
        for curve in result.curves:
            name = slug(f"{result.trace} {curve.fleet} {curve.door}")
            kept = curve.speed_kept
            figures[f"{name}_speed_90"] = None if kept is None else round(kept, 2)
            for point in curve.points:
                figures[f"{name}_{point.speed:g}x"] = round(point.score.goodput, 4)
    return figures


def slug(text: str) -> str:
    """A name for JSON: lower case, words joined by underscores."""
    return "_".join(re.findall(r"[a-z0-9.]+", text.lower()))


def print_trace(result: TraceResult, tpot_ms: float) -> None:
    """A table for each trace: goodput by speed, and what became of the others."""
    pools = ", ".join(f"{name} {count:,}" for name, count in result.pool_tokens.items())
    print(
        f"\n{result.trace}: {result.request_count} requests of {result.seconds:.0f} s; TTFT up "
        f"to {result.ttft_ms:g} ms, TPOT up to {tpot_ms:g} ms; a worker's pools {pools} tokens"
    )
    print(
        f"{'fleet':11}{'door':25}{'90 % up to':>11}  goodput by speed, until it is below a half"
    )
    for curve in result.curves:
        kept = curve.speed_kept
        shown = "-" if kept is None else f"{kept:.1f}x"
        goodputs = "  ".join(f"{p.speed:g}x {p.score.goodput:.1%}" for p in curve.points)
        print(f"{curve.fleet:11}{curve.door:25}{shown:>11}  {goodputs}")
    print(
        f"{'fleet':11}{'door':25}{'speed':>6}{'goodput':>9}{'late':>6}{'slow':>6}{'refused':>9}"
        f"{'timed out':>11}{'given up':>10}{'hung':>6}{'preempted':>11}{'TTFT p50, p99 ms':>20}"
        f"{'TPOT p50, p99 ms':>18}"
    )
    for curve in result.curves:
        for point in curve.points:
            found = point.score
            print(
                f"{curve.fleet:11}{curve.door:25}{point.speed:5g}x{found.goodput:9.1%}"
                f"{found.late_ttft:6}{found.late_tpot:6}{found.refused:9}{found.timed_out:11}"
                f"{found.given_up:10}{found.hung:6}{found.preemptions:11}"
                f"{found.ttft_ms_p50:11.0f}{found.ttft_ms_p99:9.0f}"
                f"{found.tpot_ms_p50:10.2f}{found.tpot_ms_p99:8.2f}"
            )
