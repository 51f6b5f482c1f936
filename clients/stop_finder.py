"""Finds stop strings in text that arrives in pieces, and keeps back what may become one.

A stop string is text, so the outcome does not depend on where pieces begin or end: the text is
cut where the earliest occurrence of any stop string begins. Each stop string has a matching
automaton (Knuth, Morris and Pratt) whose state is the longest beginning of the stop string with
which the text so far ends.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """An occurrence: the text's characters [start, end)."""

    start: int
    end: int


class StopFinder:
    """Searches one text. `stops` must not hold an empty string (`ValueError`)."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty: it would match everywhere")
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._position = 0  # Characters seen.
        self._released = 0  # Characters handed out.
        self._kept = ""  # The text from position `_released` on.
        self._best: Match | None = None

    @property
    def first_match(self) -> Match | None:
        """The earliest occurrence seen so far. An earlier one may still be in the making."""
        return self._best

    @property
    def is_waiting(self) -> bool:
        """Some text is kept back."""
        return self._kept != ""

    def push(self, text: str) -> tuple[str, bool]:
        """What of the text can be released, and whether the text is cut behind that.

        After a cut, nothing more is released and `push` must not be called again.
        """
        if not self._patterns:
            return text, False
        self._kept += text
        for character in text:
            self._position += 1
            for pattern in self._patterns:
                if pattern.advance(character):
                    self._consider(Match(self._position - pattern.length, self._position))
            if self._best is not None and self._earliest_pending() >= self._best.start:
                return self._release(self._best.start), True
        return self._release(self._earliest_pending()), False

    def finish(self) -> tuple[str, bool]:
        """The rest of the text, up to the first stop string, and whether there was one."""
        if self._best is not None:
            return self._release(self._best.start), True
        return self._release(self._position), False

    def _consider(self, match: Match) -> None:
        if self._best is None or match.start < self._best.start:
            self._best = match

    def _earliest_pending(self) -> int:
        """Where a stop string may have begun of which only the beginning has been seen."""
        return self._position - max(pattern.matched for pattern in self._patterns)

    def _release(self, until: int) -> str:
        """Hand out the kept characters below position `until`."""
        released = self._kept[: until - self._released]
        self._kept = self._kept[until - self._released :]
        self._released = until
        return released


class _Pattern:
    """One stop string's automaton: `matched` characters of it end the text so far."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallback = _fallbacks(stop)
        self.length = len(stop)
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Take one more character; True when the whole stop string ends with it."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._fallback[self.matched]
        if self._stop[self.matched] == character:
            self.matched += 1
        if self.matched < self.length:
            return False
        self.matched = self._fallback[self.matched]
        return True


def _fallbacks(stop: str) -> list[int]:
    """For each count of matched characters, the next longest beginning that is also an end."""
    fallback = [0, 0]
    for index in range(1, len(stop)):
        length = fallback[index]
        while length and stop[length] != stop[index]:
            length = fallback[length]
        fallback.append(length + 1 if stop[length] == stop[index] else 0)
    return fallback
