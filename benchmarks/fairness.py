"""How evenly tenants are served, in simulation and by a real server.

Two tenants have requests waiting, of which one sends ten times as many as the other; after a
while a third comes. The same arrivals are served twice: by fair shares, and as if all were one
tenant's, which is first come, first served. For both it tells

- what each tenant was given (prompt tokens + 4 times the tokens sampled) while the first two
  had requests waiting, the greatest difference between these two over any stretch of that time,
  and the bound on it that `docs/FAIRNESS.md` states;
- how many requests began between the third one's arrival and its first request, how long that
  took, and what part of the service it had until its last request began.

    python benchmarks/fairness.py            # some minutes, with a real model
    python benchmarks/fairness.py --quick    # half a minute, simulation alone

In the simulation time is virtual, and figures are the same on every machine. The last line is
JSON: `sim_…` and `real_…`, of which those that end in `_fcfs` are of first come, first served.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # The simulator is there.

from fairness_runs import Fairness, simulated

Figures = dict[str, float]
TENANTS = ("busy", "calm", "late")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller, and without a model")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1, help="of the server's worker")
    parser.add_argument("--calm", type=int, default=30, help="requests of the smaller tenant")
    parser.add_argument("--seeds", type=int, default=5, help="simulations; the worst counts")
    arguments = parser.parse_args()

    figures: Figures = {}
    seeds = range(2 if arguments.quick else arguments.seeds)
    for are_apart in (True, False):
        runs = [simulated(seed, are_apart=are_apart) for seed in seeds]
        note("sim", are_apart, max(runs, key=lambda run: run.difference), figures)
    note_ratios("sim", figures)
    if not arguments.quick:
        from fairness_served import served

        fair, first_come = served(arguments.model, arguments.threads, arguments.calm)
        note("real", True, fair, figures)
        note("real", False, first_come, figures)
        note_ratios("real", figures)
    rounded = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps({"benchmark": "fairness", "figures": rounded}))


def note(where: str, are_apart: bool, run: Fairness, figures: Figures) -> None:
    """Print a run, and add its figures."""
    if not figures or (where == "real" and are_apart):
        heads = [f"{tenant} got" for tenant in TENANTS]
        print(
            f"\n{'':22}"
            + "".join(f"{head:>11}" for head in [*heads, "difference", "bound"])
            + f"{'before late':>13}{'after':>9}{'share':>8}"
        )
    name = "fair shares" if are_apart else "first come first"
    print(
        f"{where:5}{name:17}"
        + "".join(f"{run.served[tenant]:11,.0f}" for tenant in TENANTS)
        + f"{run.difference:11,.0f}{run.bound:11,.0f}"
        + f"{run.late_begun_before:13d}{run.late_wait_s:7.2f} s{run.late_share:8.3f}",
        flush=True,
    )
    end = "" if are_apart else "_fcfs"
    for tenant in TENANTS:
        figures[f"{where}_service_{tenant}{end}"] = run.served[tenant]
    figures[f"{where}_difference{end}"] = run.difference
    figures[f"{where}_late_begun_before{end}"] = run.late_begun_before
    figures[f"{where}_late_wait_s{end}"] = run.late_wait_s
    figures[f"{where}_late_share{end}"] = run.late_share
    if are_apart:
        figures[f"{where}_bound"] = run.bound


def note_ratios(where: str, figures: Figures) -> None:
    """How many times as large the other way's are."""
    for name in ("difference", "late_wait_s"):
        ours, other = figures[f"{where}_{name}"], figures[f"{where}_{name}_fcfs"]
        figures[f"{where}_{name}_fcfs_over_ours"] = other / max(ours, 1e-6)
    difference = figures[f"{where}_difference_fcfs_over_ours"]
    wait = figures[f"{where}_late_wait_s_fcfs_over_ours"]
    print(
        f"{where:5}first come first: {difference:.0f} times the difference, {wait:.0f} times "
        "the wait of the late one"
    )


if __name__ == "__main__":
    main()
