"""Bugs in early destinations: what moves while a prompt runs."""

from mutants.mutant import BySeed, ByTest, Mutant

OF_EARLY = (
    Mutant(
        "an early place is not taken back by who lacks room",
        "scheduler/early.py",
        "    seats = tuple(worker.early.values())\n",
        "    seats = ()\n",
        ByTest("scheduler/test_early.py"),
    ),
    Mutant(
        "who must wait for a destination keeps an early place",
        "scheduler/early.py",
        "    for request in fleet.awaiting_target:\n",
        "    for request in ():\n",
        ByTest("scheduler/test_early.py"),
    ),
    Mutant(
        "pages are pulled before they are settled",
        "scheduler/pulls.py",
        "return whole_pages_end(whole, source.settled)",
        "return whole_pages_end(whole, Tokens(source.lengths.prompt - 1))",
        BySeed(checks=False),
    ),
    Mutant(
        "what is left is pulled from one page too late on",
        "scheduler/pulls.py",
        "Tokens(max(start, target.pulled.until))",
        "Tokens(max(start, target.pulled.until and target.pulled.until + group.page_tokens))",
        BySeed(checks=False),
    ),
    Mutant(
        "a row is begun although a part of its pages is all that has come",
        "scheduler/reports.py",
        "is_early = seat.pulled.asked_until < seat.lengths.prompt",
        "is_early = request.target is not seat",
        BySeed(checks=False),
    ),
    Mutant(
        "a pull that is void is sent all the same",
        "scheduler/state.py",
        "op for op in self.operations if not (isinstance(op, Fetch) and op.ticket == ticket)",
        "op for op in self.operations",
        ByTest("scheduler/test_early.py"),
    ),
    Mutant(
        "a worker owes an answer for an early place without a pull",
        "scheduler/state.py",
        " and not (self.is_early and self.request.ticket is None)",
        "",
        ByTest("scheduler/test_early.py"),
    ),
    Mutant(
        "an early place is taken where nobody else would find room",
        "scheduler/early.py",
        "Pages(2 * pages + ",
        "Pages(pages + ",
        ByTest("scheduler/test_early.py"),
    ),
)
