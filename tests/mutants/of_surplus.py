"""Bugs in asking back the pages that rows hold ahead."""

from mutants.mutant import BySeed, ByTest, Mutant
from simulation.scenario import TIGHT_SEED_MIN

OF_SURPLUS = (
    Mutant(
        "pages that are asked back are free before the worker has answered",
        "scheduler/surplus.py",
        "    seat.worker.add(Trim(seat.row, until))",
        "    seat.worker.add(Trim(seat.row, until))\n"
        "    for group, table in enumerate(seat.holding.tables):\n"
        "        seat.worker.books.shed(seat.holding, group, table.beyond(until))",
        BySeed(first=TIGHT_SEED_MIN, checks=False),
    ),
    Mutant(
        "pages that were given back are given back again when their row is over",
        "kvcache/books.py",
        "pages = holding.tables[group].drop_last(count)",
        "pages = holding.tables[group].ids[holding.tables[group].page_count - count :]",
        BySeed(first=TIGHT_SEED_MIN, checks=False),
    ),
    Mutant(
        "a row takes pages while it is asked for some",
        "scheduler/growth.py",
        "return [seat for seat in found if not seat.is_asked_back]",
        "return found",
        ByTest("scheduler/test_run_ahead.py"),
    ),
    Mutant(
        "a row has more pages in the arrays than it has kept",
        "scheduler/surplus.py",
        "    seat.worker.rows.covered[seat.row] = holding.covered\n",
        "",
        BySeed(first=TIGHT_SEED_MIN),
    ),
    Mutant(
        "a row that is asked for pages need not be looked at until it has run on",
        "scheduler/surplus.py",
        "seat.next_event = NO_EVENT",
        "pass",
        BySeed(first=TIGHT_SEED_MIN),
    ),
    Mutant(
        "what rows read no more is told by positions that are not settled",
        "scheduler/surplus.py",
        "worker.books.reclaim(seat.holding, seat.settled)",
        "worker.books.reclaim(seat.holding, seat.holding.covered)",
        BySeed(first=TIGHT_SEED_MIN, checks=False),
    ),
    Mutant(
        "a worker gives back pages of positions that it has been asked to keep",
        "scheduler/surplus.py",
        "if not 0 <= count <= table.beyond(until):",
        "if not 0 <= count <= table.page_count:",
        ByTest("scheduler/test_run_ahead.py"),
    ),
    Mutant(
        "an answer is believed of a row that was not asked",
        "scheduler/surplus.py",
        "if not seat.is_asked_back or len(counts) != len(holding.tables):",
        "if len(counts) != len(holding.tables):",
        ByTest("scheduler/test_run_ahead.py"),
    ),
)
