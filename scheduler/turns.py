"""The turns of chunks that are with a worker: each is one launch's worth; see `chunks`."""

from collections import Counter
from collections.abc import Iterable


class Turns:
    """How many chunks of each turn the worker has not answered for."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def next(self) -> int:
        """The number of the next turn: above those of all that are with the worker."""
        return max(self._counts, default=-1) + 1

    def open(self, turn: int) -> None:
        """A chunk of this turn is given to the worker."""
        self._counts[turn] = self._counts.get(turn, 0) + 1

    def close(self, turn: int) -> None:
        """It has answered for a chunk of this turn, or the chunk's row is gone."""
        self._counts[turn] -= 1
        if not self._counts[turn]:
            del self._counts[turn]

    def check(self, turns: Iterable[int]) -> None:
        """`turns` are those of all chunks that rows wait for."""
        assert Counter(turns) == self._counts, "a chunk is lost, or answered for twice"
