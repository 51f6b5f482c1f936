"""What each token changes of a worker's rows, in arrays by row number.

A report names many rows, and for most of them a token is a sum and nothing more. So what a
token changes is here and nowhere else, and changes for all rows of a report together:

1. `take` gives a row to a request. While its prompt runs, `settled` is set chunk by chunk.
2. Once it decodes, `next_event` says up to where it needs no look: some position that its pages
   cover, and below its end. `advance` moves the rows that stay below theirs.
3. All other rows are left to the caller, who looks at each: those that come to their event,
   those that have none (0: the row is nobody's, has not begun to decode, or has ended), and
   those with an answer that cannot be.
4. `release` takes the row back.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tidegate.ipc.protocol import Row
from tidegate.kvcache.layout import Tokens

Int64s = npt.NDArray[np.int64]

NO_EVENT = Tokens(0)  # Of a row whose every token needs a look.


class RowArrays:
    """Of row r: `settled[r]` positions are answered for and `output_count[r]` tokens are out.

    `token_us[r]` is when the last of them came. A row that decodes has one position settled for
    each token but the last: `settled == settled_before + output_count`. Its pages reach up to
    `covered[r]`, which is 0 for other rows.
    """

    def __init__(self, row_count: int) -> None:
        self.settled: Int64s = np.zeros(row_count, np.int64)
        self.settled_before: Int64s = np.zeros(row_count, np.int64)
        self.output_count: Int64s = np.zeros(row_count, np.int64)
        self.next_event: Int64s = np.zeros(row_count, np.int64)
        self.covered: Int64s = np.zeros(row_count, np.int64)
        self.token_us: Int64s = np.zeros(row_count, np.int64)

    def take(
        self, row: Row, *, settled: Tokens, prompt: Tokens, output_count: int, token_us: int
    ) -> None:
        """The row is that of a request with so many tokens in its own prompt."""
        self.settled[row] = settled
        self.settled_before[row] = prompt - 1
        self.output_count[row] = output_count
        self.next_event[row] = NO_EVENT
        self.covered[row] = 0
        self.token_us[row] = token_us

    def release(self, row: Row) -> None:
        self.next_event[row] = NO_EVENT
        self.covered[row] = 0

    def advance(
        self, rows: Int64s, counts: Int64s, now_us: int
    ) -> tuple[Int64s, Sequence[int]]:
        """Row `rows[i]` has sampled `counts[i]` tokens; the rows differ.

        Returns the output index of the first token of each, and which i are left to the caller:
        nothing of those has changed.
        """
        first_indexes = self.output_count[rows]
        output_counts = first_indexes + counts
        settled = self.settled_before[rows] + output_counts
        moves = (settled < self.next_event[rows]) & (counts > 0)
        left: Sequence[int] = ()
        if not moves.all():
            left = np.flatnonzero(~moves).tolist()
            rows, settled, output_counts = rows[moves], settled[moves], output_counts[moves]
        self.settled[rows] = settled
        self.output_count[rows] = output_counts
        self.token_us[rows] = now_us
        return first_indexes, left
