"""Bugs in telling rows where they sit out."""

from mutants.mutant import ByTest, Mutant

OF_LIMITS = (
    Mutant(
        "a row with stop text is looked at after it has come to its limit",
        "scheduler/limits.py",
        "seat.settled + STOP_TEXT_AHEAD_TOKENS // 2",
        "seat.settled + STOP_TEXT_AHEAD_TOKENS + 1",
        ByTest("scheduler/test_limits.py"),
    ),
    Mutant(
        "rows do not go on when their reader has caught up",
        "scheduler/limits.py",
        "        request.is_held = changed.is_behind",
        "        request.is_held = True",
        ByTest("scheduler/test_limits.py"),
    ),
    Mutant(
        "a worker owes an answer for rows that sit out",
        "scheduler/losses.py",
        "if any(seat.owes for seat in worker.seats.values()):",
        "if any(not seat.is_ended for seat in worker.seats.values()):",
        ByTest("scheduler/test_limits.py"),
    ),
)
