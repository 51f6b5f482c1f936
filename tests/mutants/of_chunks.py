"""Bugs in giving out chunks before the last ones are answered."""

from mutants.mutant import BySeed, ByTest, Mutant

OF_CHUNKS = (
    Mutant(
        "the next chunk begins where the last answered one ends",
        "scheduler/chunks.py",
        "prompt, given = seat.lengths.prompt, seat.given",
        "prompt, given = seat.lengths.prompt, seat.settled",
        BySeed(checks=False),
    ),
    Mutant(
        "a prompt's second chunk takes what pages there are",
        "scheduler/chunks.py",
        "        if seat.chunks and not _has_room(seat, until):\n            continue\n",
        "",
    ),
    Mutant(
        "two turns have the same number",
        "scheduler/turns.py",
        "return max(self._counts, default=-1) + 1",
        "return max(self._counts, default=0)",
        ByTest("scheduler/test_chunks.py"),
    ),
    Mutant(
        "rows that decode wait for whole chunks",
        "scheduler/chunks.py",
        "if mixed is None or not _decodes(worker):",
        "if mixed is None or _decodes(worker):",
        ByTest("scheduler/test_chunks.py"),
    ),
)
