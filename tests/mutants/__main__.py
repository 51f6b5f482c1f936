"""`python -m mutants`: plant bugs in a copy of the package, and say what finds each of them.

Words choose the bugs whose description or file contains one of them.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants.mutant import Mutant, Verdict, run_mutant
from mutants.planted import MUTANTS

NAME_WIDTH = max(len(mutant.name) for mutant in MUTANTS)
PATH_WIDTH = max(len(mutant.path) for mutant in MUTANTS)


def run_one(mutant: Mutant) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        return run_mutant(mutant, Path(folder))


def row(name: str, path: str, killed_by: str) -> str:
    return f"{name:{NAME_WIDTH}}  {path:{PATH_WIDTH}}  {killed_by}"


def main(arguments: Sequence[str] | None = None, planted: Sequence[Mutant] = MUTANTS) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of descriptions or paths")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--messages", action="store_true", help="how each one shows")
    options = parser.parse_args(arguments)
    mutants = [
        mutant
        for mutant in planted
        if not options.words
        or any(word in f"{mutant.name} {mutant.path}" for word in options.words)
    ]
    if not mutants:
        parser.error("there is no such bug")
    print(row("the bug", "planted in", "found by"))
    begin = time.monotonic()
    survivors: list[Verdict] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(run_one, mutants):
            mutant = verdict.mutant
            print(row(mutant.name, mutant.path, verdict.killed_by or "NOTHING"), flush=True)
            if options.messages:
                print(f"    {verdict.message} ({verdict.seconds:.1f} s)")
            if not verdict.killed_by:
                survivors.append(verdict)
    for verdict in survivors:
        print(f"\nNothing finds that {verdict.mutant.name}:\n{verdict.output}")
    seconds = time.monotonic() - begin
    print(f"{len(mutants)} bugs planted in {seconds:.0f} s; {len(survivors)} not found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
