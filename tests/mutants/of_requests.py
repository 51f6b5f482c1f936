"""Bugs in what the scheduler does with requests, rows, plans and answers."""

from mutants.mutant import BySeed, ByTest, Mutant
from simulation.scenario import TIGHT_SEED_MIN

OF_REQUESTS = (
    Mutant(
        "a row's number is given out while its last user's answers are under way",
        "scheduler/fleet.py",
        "worker.rows_draining.append((worker.next_seq, seat.row))",
        "worker.rows_free.appendleft(seat.row)",
        BySeed(checks=False),
    ),
    Mutant(
        "pages are given back by a position that is not settled",
        "scheduler/reports.py",
        "seat.worker.books.reclaim(seat.holding, position)",
        "seat.worker.books.reclaim(seat.holding, Tokens(position + 1))",
        BySeed(checks=False),
    ),
    Mutant(
        "a decoding row gets its next page one position too late",
        "scheduler/growth.py",
        "Tokens(covered - lead.low + 1)",
        "Tokens(covered - lead.low + 2)",
        BySeed(checks=False),
    ),
    Mutant(
        "a chunk is not cut to the pages in hand",
        "scheduler/chunks.py",
        "return min(until, holding.covered)",
        "return until",
    ),
    Mutant(
        "a pull of a request that has ended is still expected",
        "scheduler/state.py",
        "del self.tickets[ticket]",
        "assert ticket in self.tickets",
    ),
    Mutant(
        "a cancelled chunk counts as in flight for ever",
        "scheduler/fleet.py",
        "worker.turns.close(chunk.turn)",
        "pass",
        BySeed(checks=False),
    ),
    Mutant(
        "an ended request is started",
        "scheduler/fleet.py",
        "began_unsent = worker.forget_unsent(seat.row)",
        "began_unsent = False",
        BySeed(first=TIGHT_SEED_MIN + 200, checks=False),
    ),
    Mutant(
        "tokens are delivered with the index of the next ones",
        "scheduler/row_arrays.py",
        "return first_indexes, left",
        "return first_indexes + counts, left",
    ),
    Mutant(
        "a request that fits nowhere any more goes on waiting",
        "scheduler/losses.py",
        "for request in tuple(fleet.requests.values()):",
        "for request in ():",
        BySeed(checks=False),
    ),
    Mutant(
        "the door counts a page less than the planner",
        "scheduler/door.py",
        "if needed > limit",
        "if needed > limit + 1",
    ),
    Mutant(
        "the source's pages go as soon as the pull has been sent",
        "scheduler/pulls.py",
        "request.ticket = ticket",
        "request.ticket = ticket; source.worker.books.withdraw(source.holding, 0)",
        BySeed(checks=False),
    ),
    Mutant(
        "the request of highest rank gives way",
        "scheduler/growth.py",
        "victim = max(worker.seats.values()",
        "victim = min(worker.seats.values()",
        BySeed(first=TIGHT_SEED_MIN),
    ),
    Mutant(
        "pages of who gives way are free before the worker has answered",
        "scheduler/growth.py",
        "        fleet.requeue(request, now_us)",
        "        fleet.requeue(request, now_us)\n"
        "        victim.worker.books.complete(victim.worker.next_seq)",
        BySeed(first=TIGHT_SEED_MIN, checks=False),
    ),
    Mutant(
        "a row without a page is forgotten",
        "scheduler/growth.py",
        "            fleet.look_at(seat)",
        "            pass",
        BySeed(first=TIGHT_SEED_MIN),
    ),
    Mutant(
        "a row that gives way is not stopped",
        "scheduler/fleet.py",
        "if seat.is_started and not seat.is_ended and not began_unsent:",
        "if seat.is_started and not seat.is_ended and not began_unsent"
        " and not request.preemption_count:",
        BySeed(first=TIGHT_SEED_MIN, checks=False),
    ),
    Mutant(
        "a request is resumed without its last token",
        "scheduler/placement.py",
        "output_index=seat.request.output_count,",
        "output_index=max(0, seat.request.output_count - 1),",
        BySeed(first=TIGHT_SEED_MIN, checks=False),
    ),
    Mutant(
        "a resumed request runs a token beyond its end",
        "scheduler/state.py",
        "Tokens(self.lengths.output - self.output_count),",
        "Tokens(self.lengths.output - self.output_count + (self.output_count > 0)),",
        BySeed(first=TIGHT_SEED_MIN, checks=False),
    ),
    Mutant(
        "a resumed request is prefilled without its tokens",
        "scheduler/state.py",
        "Tokens(self.lengths.prompt + self.output_count),",
        "Tokens(self.lengths.prompt),",
        BySeed(first=TIGHT_SEED_MIN, checks=False),
    ),
    Mutant(
        "a request takes a new rank when it gives way",
        "scheduler/growth.py",
        "request.preemption_count += 1",
        "request.preemption_count += 1; request._rank = (0, -request.preemption_count)",
        BySeed(first=TIGHT_SEED_MIN),
    ),
    # A stale report is believed.
    Mutant(
        "pages are free when the worker has seen their plan, not when it has done with it",
        "scheduler/reports.py",
        "worker.complete(report.completed)",
        "worker.complete(report.applied)",
        BySeed(checks=False),
    ),
    Mutant(
        "a report of plans that cannot be over is believed",
        "scheduler/reports.py",
        "if not worker.completed <= report.completed <= worker.seq:",
        "if False:",
        ByTest("scheduler/test_reports.py"),
    ),
    Mutant(
        "a chunk that was not given out is taken for the one that was",
        "scheduler/reports.py",
        "if seat.chunk_until != chunk.until:",
        "if seat.chunk_until is None:",
        ByTest("scheduler/test_reports.py"),
    ),
    Mutant(
        "a late fault ends the next request on the row",
        "scheduler/reports.py",
        "if seat is None or seat.request.request_id != fault.request_id:",
        "if seat is None:",
        ByTest("scheduler/test_reports.py"),
    ),
    # Unsettled positions are believed to be settled.
    Mutant(
        "pages below a chunk that has just been given out are given back",
        "scheduler/chunks.py",
        "        seat.chunks.append(chunk)",
        "        seat.chunks.append(chunk)\n        worker.books.reclaim(seat.holding, until)",
        BySeed(checks=False),
    ),
    Mutant(
        "a row that begins to decode gives back what its next query reads",
        "scheduler/reports.py",
        "    settle(fleet, seat, lengths.prompt)",
        "    settle(fleet, seat, lengths.prompt)\n"
        "    worker.books.reclaim(seat.holding, lengths.end)",
        BySeed(checks=False),
    ),
    Mutant(
        "each launch gives a worker more time for a plan that it does not take",
        "scheduler/reports.py",
        "    if is_answer or not worker.was_launching:",
        "    if True:",
        ByTest("scheduler/test_losses.py"),
    ),
    Mutant(
        "a plan has to be answered with the launch that was under way when it came",
        "scheduler/reports.py",
        "    if is_answer or not worker.was_launching:",
        "    if is_answer:",
        ByTest("scheduler/test_losses.py"),
    ),
)
