"""The simulator finds planted bugs: a copy of the package is patched and run on a few seeds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import tidegate
from simulation.scenario import TIGHT_SEED_MIN

SEED_COUNT = 150
PACKAGE = Path(tidegate.__file__).parent
TESTS = Path(__file__).parent.parent


class Mutant(msgspec.Struct, frozen=True):
    """One bug: in `path`, `old` (which is there once) becomes `new`."""

    name: str
    path: str
    old: str
    new: str
    seed_min: int = 0  # The first seed that is run.
    has_checks: bool = True  # Does the core check itself, or is it the pages that tell?


MUTANTS = (
    Mutant(
        "withdrawn pages are free before the worker has answered",
        "kvcache/books.py",
        "while self._draining and self._draining[0].plan <= plan:",
        "while self._draining:",
        has_checks=False,
    ),
    Mutant(
        "withdrawn pages are free one plan too early",
        "kvcache/books.py",
        "while self._draining and self._draining[0].plan <= plan:",
        "while self._draining and self._draining[0].plan <= plan + 1:",
        has_checks=False,
    ),
    Mutant(
        "a row's number is given out while its last user's answers are under way",
        "scheduler/fleet.py",
        "worker.rows_draining.append((worker.next_seq, seat.row))",
        "worker.rows_free.appendleft(seat.row)",
        has_checks=False,
    ),
    Mutant(
        "pages are given back by a position that is not settled",
        "scheduler/reports.py",
        "seat.worker.books.reclaim(seat.holding, position)",
        "seat.worker.books.reclaim(seat.holding, Tokens(position + 1))",
        has_checks=False,
    ),
    Mutant(
        "the floor of a window group lacks the page of the edge",
        "kvcache/demand.py",
        "return Pages(page_count(Tokens(window + ahead - 2), page_tokens) + 1)",
        "return Pages(max(1, page_count(Tokens(window + ahead - 2), page_tokens)))",
    ),
    Mutant(
        "pages that are promised to one request are taken by another",
        "kvcache/books.py",
        "limit = holding.lacks(group) + (self.available(group) if surplus else 0)",
        "limit = self.pools[group].free_count",
    ),
    Mutant(
        "a decoding row gets its next page one position too late",
        "scheduler/growth.py",
        "Tokens(covered - ahead + 1)",
        "Tokens(covered - ahead + 2)",
        has_checks=False,
    ),
    Mutant(
        "a hand-off leaves out the first position that decode reads",
        "kvcache/books.py",
        "else group.first_needed(first_query)",
        "else group.first_needed(Tokens(first_query + 1))",
        has_checks=False,
    ),
    Mutant(
        "a chunk is not cut to the pages in hand",
        "scheduler/planner.py",
        "return min(until, holding.covered)",
        "return until",
    ),
    Mutant(
        "a pull of a request that has ended is still expected",
        "scheduler/fleet.py",
        "del request.target.worker.tickets[request.ticket]",
        "assert request.ticket in request.target.worker.tickets",
    ),
    Mutant(
        "a cancelled chunk counts as in flight for ever",
        "scheduler/fleet.py",
        "worker.chunks_in_flight -= 1",
        "worker.chunks_in_flight -= 0",
        has_checks=False,
    ),
    Mutant(
        "an ended request is started",
        "scheduler/fleet.py",
        "began_unsent = worker.forget_unsent(seat.row)",
        "began_unsent = False",
        has_checks=False,
    ),
    Mutant(
        "tokens are delivered with the index of the next ones",
        "scheduler/reports.py",
        "EmitTokens(request.request_id, request.output_count, row.count",
        "EmitTokens(request.request_id, count, row.count",
    ),
    Mutant(
        "a request that fits nowhere any more goes on waiting",
        "scheduler/losses.py",
        "for request in tuple(fleet.requests.values()):",
        "for request in ():",
        has_checks=False,
    ),
    Mutant(
        "the door counts a page less than the planner",
        "scheduler/door.py",
        "if needed > limit",
        "if needed > limit + 1",
    ),
    Mutant(
        "the source's pages go as soon as the pull has been sent",
        "scheduler/placement.py",
        "request.ticket = ticket",
        "request.ticket = ticket; source.worker.books.withdraw(source.holding, 0)",
        has_checks=False,
    ),
    Mutant(
        "the request of highest rank gives way",
        "scheduler/growth.py",
        "victim = max(worker.seats.values()",
        "victim = min(worker.seats.values()",
        seed_min=TIGHT_SEED_MIN,
    ),
    Mutant(
        "pages of who gives way are free before the worker has answered",
        "scheduler/growth.py",
        "        fleet.requeue(request, now_us)",
        "        fleet.requeue(request, now_us)\n"
        "        victim.worker.books.complete(victim.worker.next_seq)",
        seed_min=TIGHT_SEED_MIN,
        has_checks=False,
    ),
    Mutant(
        "a row without a page is forgotten",
        "scheduler/growth.py",
        "fleet.due.append(seat)",
        "pass",
        seed_min=TIGHT_SEED_MIN,
    ),
    Mutant(
        "a row that gives way is not stopped",
        "scheduler/fleet.py",
        "if seat.is_started and not seat.is_ended and not began_unsent:",
        "if seat.is_started and not seat.is_ended and not began_unsent"
        " and not request.preemption_count:",
        seed_min=TIGHT_SEED_MIN,
        has_checks=False,
    ),
    Mutant(
        "a request is resumed without its last token",
        "scheduler/placement.py",
        "output_index=seat.request.output_count,",
        "output_index=max(0, seat.request.output_count - 1),",
        seed_min=TIGHT_SEED_MIN,
        has_checks=False,
    ),
    Mutant(
        "a resumed request runs a token beyond its end",
        "scheduler/state.py",
        "Tokens(self.lengths.output - self.output_count),",
        "Tokens(self.lengths.output - self.output_count + (self.output_count > 0)),",
        seed_min=TIGHT_SEED_MIN,
        has_checks=False,
    ),
    Mutant(
        "a resumed request is prefilled without its tokens",
        "scheduler/state.py",
        "Tokens(self.lengths.prompt + self.output_count),",
        "Tokens(self.lengths.prompt),",
        seed_min=TIGHT_SEED_MIN,
        has_checks=False,
    ),
    Mutant(
        "decode begins without a page for its first token",
        "kvcache/demand.py",
        "begun = Tokens(min(lengths.end, lengths.prompt + 1))",
        "begun = Tokens(min(lengths.end, lengths.prompt) - 1)",
        seed_min=TIGHT_SEED_MIN,
    ),
    Mutant(
        "a request takes a new rank when it gives way",
        "scheduler/growth.py",
        "request.preemption_count += 1",
        "request.preemption_count += 1; request.rank = (0, -request.preemption_count)",
        seed_min=TIGHT_SEED_MIN,
    ),
)


def run_mutant(mutant: Mutant, folder: Path) -> "subprocess.CompletedProcess[str]":
    package = folder / "tidegate"
    for part in ("kvcache", "ipc", "scheduler"):
        shutil.copytree(PACKAGE / part, package / part)
    shutil.copy(PACKAGE / "__init__.py", package)
    path = package / mutant.path
    source = path.read_text()
    assert source.count(mutant.old) == 1, "the mutant no longer fits the source"
    path.write_text(source.replace(mutant.old, mutant.new))
    command = [
        sys.executable,
        "-m",
        "simulation",
        "--stop",
        "--seeds",
        f"{mutant.seed_min}:{mutant.seed_min + SEED_COUNT}",
    ]
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{TESTS}"}
    if not mutant.has_checks:
        command.append("--no-checks")
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_simulator_finds_that(mutant: Mutant, tmp_path: Path) -> None:
    run = run_mutant(mutant, tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "failed: " in run.stdout
