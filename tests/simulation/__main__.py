"""`python -m simulation --seeds A:B`: run many seeds, and say which of them fail and how."""

import argparse
import hashlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from simulation.outcome import Outcome, add
from simulation.overload import draw_any
from simulation.simulator import Simulator

SEEDS_PER_TASK = 50


def run_seed(seed: int, *, checks: bool = True) -> Outcome:
    return Simulator(draw_any(seed), checks=checks).run()


def run_seeds(
    seeds: range, *, checks: bool = True, stops: bool = False
) -> tuple[list[tuple[int, str]], Outcome]:
    """The failures, each as a seed and its traceback's end, and all outcomes added up."""
    failures: list[tuple[int, str]] = []
    total = Outcome()
    for seed in seeds:
        try:
            add(total, run_seed(seed, checks=checks))
        except Exception:  # Whatever goes wrong in a run is what is looked for.
            failures.append((seed, traceback.format_exc()))
            if stops:
                break
    return failures, total


def show_trace(seed: int) -> None:
    """Print a run event by event, up to its failure if it fails."""
    scenario = draw_any(seed)
    print(scenario)
    Simulator(scenario, trace=lambda now_us, item: print(f"{now_us:>10} {item}")).run()


def digest(seed: int) -> str:
    """A hash of every event and command of a run, with its time."""
    state = hashlib.blake2b(digest_size=16)

    def note(now_us: int, item: object) -> None:
        state.update(f"{now_us} {item}\n".encode())

    Simulator(draw_any(seed), trace=note).run()
    return state.hexdigest()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:2000", help="first:end, or a single seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--no-checks", action="store_true", help="skip the core's own checks")
    parser.add_argument("--stop", action="store_true", help="end at the first failure")
    parser.add_argument("--trace", action="store_true", help="print every event and command")
    parser.add_argument("--digest", action="store_true", help="print a hash of each trace")
    options = parser.parse_args(arguments)
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if options.trace:
        for seed in seeds:
            show_trace(seed)
        return 0
    if options.digest:
        for seed in seeds:
            print(seed, digest(seed))
        return 0
    begin = time.monotonic()
    parts = [seeds[at : at + SEEDS_PER_TASK] for at in range(0, len(seeds), SEEDS_PER_TASK)]
    run = partial(run_seeds, checks=not options.no_checks, stops=options.stop)
    failures: list[tuple[int, str]] = []
    total = Outcome()
    for part_failures, part_total in _map(run, parts, options.jobs):
        for seed, text in part_failures:
            last = text.strip().splitlines()[-1]
            print(f"seed {seed} failed: {last}", flush=True)
            failures.append((seed, text))
        add(total, part_total)
        if failures and options.stop:
            break
    seconds = time.monotonic() - begin
    if failures:
        print(f"\nThe first failure, seed {failures[0][0]}:\n{failures[0][1]}")
    cancelled = {phase.value: count for phase, count in total.cancelled_in.items()}
    print(
        f"{len(seeds)} seeds and {total.event_count} events in {seconds:.1f} s, "
        f"{len(failures)} failed; "
        f"{total.submitted} requests ({total.submitted / seconds:.0f} a second): "
        f"{total.complete} complete, {total.refused} refused, {total.ended_early} ended early; "
        f"{total.token_count} tokens, {total.cached_tokens} of prompts cached, "
        f"{total.stale_answer_count} late answers, "
        f"{total.pass_count} passes, "
        f"{total.given_back_count} pages held ahead given back, "
        f"{total.early_count} early destinations with {total.early_pull_count} pulls "
        f"({total.early_lost_count} taken back), "
        f"{total.preemption_count} preemptions, {total.restart_count} begun anew, "
        f"{total.fence_count} workers fenced, "
        f"{total.queue_timeout_count} ended in the queue, "
        f"cancelled in {cancelled}"
    )
    return 1 if failures else 0


def _map(
    run: "Callable[[range], tuple[list[tuple[int, str]], Outcome]]",
    parts: list[range],
    jobs: int,
) -> Iterator[tuple[list[tuple[int, str]], Outcome]]:
    if jobs == 1:
        yield from map(run, parts)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
