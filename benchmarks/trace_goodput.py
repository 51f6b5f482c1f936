"""Goodput of whole traces in virtual time: three doors, and colocated beside disaggregated.

    python benchmarks/trace_goodput.py TRACE [TRACE …]         # some ten minutes a trace
    python benchmarks/trace_goodput.py --help

Each trace (see request_traces.py for the forms) is sent ever faster to a fleet of four workers
until less than half of it is served within the limits. docs/GOODPUT.md tells what is compared,
and what came of it. Workers have the measured costs of a real one, all scaled by one factor;
everything that is decided by tidegate is decided by its real core.

The last line is JSON: for each curve the largest speed at which 90 % of all requests are still
served within the limits (null: not even at the slowest), and its goodput at each speed.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from cost_model import COSTS_FILE, Costs, read_costs
from goodput import Limits, score
from goodput_results import Curve, Point, Results, TraceResult, figures_of, print_trace
from request_traces import TraceError, TraceRequest, read_trace
from tidegate.ipc.protocol import Role
from trace_fleets import (
    CACHED,
    CAPPED,
    DEADLINES,
    FLEETS,
    LAWLESS,
    OURS,
    Setup,
    make_setup,
    run_fleet,
)

COST_FACTOR = 0.01
TPOT_MS = 7.0
PATIENCE_MS = 60_000.0
REQUEST_COUNT = 1000
BREAK_SHARE = 0.5

# Every curve: a fleet, and who decides in it.
CURVES = (
    ("4 both", CAPPED),
    ("4 both", LAWLESS),
    ("4 both", OURS),
    ("4 both", DEADLINES),
    ("3 P + 1 D", CAPPED),
    ("3 P + 1 D", LAWLESS),
    ("3 P + 1 D", OURS),
    ("3 P + 1 D", DEADLINES),
    ("2 P + 2 D", OURS),
    ("1 P + 3 D", OURS),
    ("4 both", CACHED),
)


class Kind(msgspec.Struct, frozen=True):
    """What fits a kind of trace: a worker's memory, its pages, the limit on TTFT, and speeds.

    The memory holds one or two of the longest requests, so that it is what limits.
    """

    kv_mib: int
    page_tokens: int
    ttft_ms: float
    speeds: tuple[float, ...]


KINDS = {
    ".csv": Kind(96, 16, 1000.0, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)),
    ".jsonl": Kind(768, 64, 5000.0, (1, 2, 3, 4, 5, 6, 8, 12)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--requests", type=int, default=REQUEST_COUNT, help="of each trace")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--speeds", type=float, nargs="+", help="default: by kind of trace")
    parser.add_argument(
        "--curves", nargs="+", default=[], help="only curves with one of these in their name"
    )
    parser.add_argument("--costs", type=Path, default=COSTS_FILE, help="measured constants")
    parser.add_argument(
        "--cost-factor",
        type=float,
        default=COST_FACTOR,
        help="all costs are so many times the measured ones",
    )
    parser.add_argument("--kv-mib", type=int, help="memory of a worker's pools")
    parser.add_argument("--ttft-ms", type=float, help="limit on the time to first token")
    parser.add_argument("--tpot-ms", type=float, default=TPOT_MS, help="limit a later token")
    parser.add_argument(
        "--patience-ms", type=float, default=PATIENCE_MS, help="until what is stuck times out"
    )
    parser.add_argument("--results", type=Path, help="write all scores to this file")
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG file")
    options = parser.parse_args()
    costs = read_costs(options.costs).costs.scaled(options.cost_factor)
    results = Results(options.cost_factor, options.tpot_ms, options.patience_ms)
    for path in options.traces:
        try:
            for number, result in enumerate(run_trace(path, options, costs)):
                if number == 0:
                    results.traces.append(result)
                write(results, options.results)
        except (OSError, TraceError) as error:
            parser.error(str(error))
        print_trace(results.traces[-1], results.tpot_ms)
    if options.plot is not None:
        from goodput_plot import draw  # It loads matplotlib.

        draw(results, options.plot)
    print(json.dumps({"benchmark": "trace_goodput", "figures": figures_of(results)}))


def write(results: Results, path: Path | None) -> None:
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def run_trace(path: Path, options: argparse.Namespace, costs: Costs) -> Iterator[TraceResult]:
    """The one result of a trace: without a curve, and again with each more.

    Progress goes to stderr.
    """
    kind = KINDS.get(path.suffix)
    if kind is None:
        raise TraceError(f"{path}: a trace ends with {' or '.join(KINDS)}")
    requests = read_trace(path, options.requests, options.first)
    kv_mib: int = options.kv_mib or kind.kv_mib
    setup = make_setup(
        costs,
        kv_memory=kv_mib * 2**20,
        page_tokens=kind.page_tokens,
        patience_ms=options.patience_ms,
        ttft_ms=options.ttft_ms or kind.ttft_ms,
    )
    result = TraceResult(
        path.stem,
        len(requests),
        requests[-1].at_us / 1e6,
        kv_mib,
        setup.ttft_ms,
        {pool.name: pool.token_count for pool in setup.sizes[Role.BOTH].pools},
    )
    yield result
    speeds: Sequence[float] = options.speeds or kind.speeds
    limits = Limits(setup.ttft_ms * 1e3, options.tpot_ms * 1e3)
    for fleet, door in CURVES:
        name = f"{fleet}, {door}"
        is_asked = not options.curves or any(part in name for part in options.curves)
        if is_asked and (door != CACHED or any(request.blocks for request in requests)):
            points = run_curve(setup, fleet, door, requests, speeds, limits)
            result.curves.append(Curve(fleet, door, points))
            yield result


def run_curve(
    setup: Setup,
    fleet: str,
    door: str,
    requests: Sequence[TraceRequest],
    speeds: Sequence[float],
    limits: Limits,
) -> list[Point]:
    """Ever faster, up to the first speed at which less than half is served well."""
    points: list[Point] = []
    for speed in sorted(speeds):
        begin = time.monotonic()
        run = run_fleet(setup, FLEETS[fleet], door, requests, speed)
        found = score(run.fates, limits)
        points.append(Point(speed, found, max(run.busy_share.values())))
        print(
            f"{fleet:10} {door:24} {speed:5g}x  goodput {found.goodput:6.1%}  "
            f"refused {found.refused}, timed out {found.timed_out}, given up "
            f"{found.given_up}, hung {found.hung}, preempted {found.preemptions}  "
            f"({time.monotonic() - begin:.1f} s)",
            file=sys.stderr,
            flush=True,
        )
        if found.goodput < BREAK_SHARE:
            break
    return points


if __name__ == "__main__":
    main()
