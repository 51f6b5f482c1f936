"""What launches have brought since the last report.

A report costs the scheduler about as much for one token a row as for several. So when launches
follow one another quickly, they share one; see `step_loop`.
"""

from tidegate.engine.runner import LaunchResult
from tidegate.ipc.protocol import ChunkDone, Row, RowEnd


class Gathered:
    """Tokens of all rows, in the order of the launches, and ends and chunks."""

    def __init__(self) -> None:
        self.tokens: dict[Row, list[int]] = {}
        self.ended: list[RowEnd] = []
        self.chunks: list[ChunkDone] = []
        self.starved: tuple[Row, ...] = ()
        self.busy_us = 0

    def add(self, result: LaunchResult) -> None:
        for row, token in zip(result.rows, result.tokens, strict=True):
            self.tokens.setdefault(row, []).append(token)
        self.ended += result.ended
        self.chunks += result.chunks
        self.starved = result.starved
        self.busy_us += result.busy_us

    @property
    def is_empty(self) -> bool:
        return not (self.tokens or self.ended or self.chunks)

    @property
    def is_urgent(self) -> bool:
        """Others wait for what a row that has ended leaves, or for what follows a chunk."""
        return bool(self.ended or self.chunks)
