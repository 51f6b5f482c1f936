"""The shell's side of a worker's rows: which stream each of them feeds, and its latest tokens.

Tokens of a report are joined to their streams for all rows together. What a stream has brought
is needed as a whole only if it begins anew; until then its latest tokens lie in an array, and
move into the stream when their place is full.
"""

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.ipc.protocol import Row
from tidegate.scheduler.streams import TOKEN_BYTES, Stream

LATEST_COUNT_MAX = 64  # Tokens of a row that have not moved into its stream.

Uint32s = npt.NDArray[np.uint32]


class Sampled(msgspec.Struct, frozen=True):
    """The tokens of a report: `counts[i]` of row `rows[i]`, one row after the other."""

    rows: Uint32s
    counts: Uint32s
    tokens: Uint32s

    def fault(self, row_count: int) -> str | None:
        """What is wrong with a report of a worker with so many rows."""
        if len(self.rows) != len(self.counts) or self.counts.sum() != len(self.tokens):
            return "rows, counts and tokens do not agree"
        if len(self.rows) and self.rows.max() >= row_count:
            return f"row {self.rows.max()} is not one of its {row_count} rows"
        times = np.bincount(self.rows, minlength=row_count)
        if times.max() > 1:
            return f"row {times.argmax()} is named twice"
        return None

    def only(self, kept: npt.NDArray[np.bool_]) -> "Sampled":
        """The rows for which `kept` holds."""
        return Sampled(
            self.rows[kept], self.counts[kept], self.tokens[np.repeat(kept, self.counts)]
        )


class Delivery(msgspec.Struct, frozen=True):
    """Tokens of several streams of one connection: parts of a `NewTokens`."""

    peer: bytes
    streams: bytes
    first_indexes: bytes
    counts: bytes
    tokens: bytes


class RowStreams:
    """Of one worker with `row_count` rows."""

    def __init__(self, row_count: int) -> None:
        self._streams: list[Stream | None] = [None] * row_count
        self._stream_ids: Uint32s = np.zeros(row_count, np.uint32)
        self._peers: npt.NDArray[np.int64] = np.zeros(row_count, np.int64)
        self._latest: Uint32s = np.zeros((row_count, LATEST_COUNT_MAX), np.uint32)
        self._latest_count: npt.NDArray[np.int64] = np.zeros(row_count, np.int64)

    def begin(self, row: Row, stream: Stream) -> None:
        """What the row samples from now on is the stream's."""
        before = self._streams[row]
        if before is not None:
            before.leave_row()
        stream.leave_row()
        self._streams[row] = stream
        self._stream_ids[row] = stream.stream_id
        self._peers[row] = stream.peer_number
        stream.take_row(self, row)

    def end(self, row: Row) -> None:
        """The row feeds no stream any more."""
        self.flush(row)
        self._streams[row] = None

    def flush(self, row: Row) -> None:
        """Move the row's latest tokens into its stream."""
        stream, count = self._streams[row], self._latest_count.item(row)
        if stream is not None and count:
            stream.add_output(self._latest[row, :count].tobytes())
        self._latest_count[row] = 0

    def deliver(self, sampled: Sampled, first_indexes: Uint32s) -> Iterator[Delivery]:
        """Keep the tokens, and put together what each connection gets."""
        rows = sampled.rows.astype(np.int64)
        self._keep(rows, sampled)
        peers = self._peers[rows]
        if (peers == peers[0]).all():
            yield self._delivery(rows, sampled, first_indexes)
            return
        order = np.argsort(peers, kind="stable")
        edges = np.flatnonzero(np.diff(peers[order])) + 1
        ends = np.cumsum(sampled.counts, dtype=np.int64)
        tokens = sampled.tokens
        for part in np.split(order, edges):
            picked = Sampled(
                sampled.rows[part],
                sampled.counts[part],
                tokens[part]
                if len(tokens) == len(rows)
                else np.concatenate(
                    [tokens[ends[at] - sampled.counts[at] : ends[at]] for at in part]
                ),
            )
            yield self._delivery(rows[part], picked, first_indexes[part])

    def _delivery(
        self, rows: npt.NDArray[np.int64], sampled: Sampled, first_indexes: Uint32s
    ) -> Delivery:
        stream = self._streams[rows.item(0)]
        assert stream is not None, "tokens of a row that feeds no stream"
        return Delivery(
            stream.peer,
            self._stream_ids[rows].tobytes(),
            first_indexes.tobytes(),
            sampled.counts.tobytes(),
            sampled.tokens.tobytes(),
        )

    def _keep(self, rows: npt.NDArray[np.int64], sampled: Sampled) -> None:
        if len(sampled.tokens) == len(rows):
            places = self._latest_count[rows]
            self._latest[rows, places] = sampled.tokens
            places += 1
            self._latest_count[rows] = places
            for row in rows[places == LATEST_COUNT_MAX].tolist():
                self.flush(Row(row))
            return
        # Several launches in one report: a row at a time costs little a token.
        begin, data = 0, sampled.tokens.tobytes()
        for index in range(len(rows)):
            row = Row(rows.item(index))
            end = begin + sampled.counts.item(index) * TOKEN_BYTES
            self.flush(row)
            stream = self._streams[row]
            assert stream is not None, "tokens of a row that feeds no stream"
            stream.add_output(data[begin:end])
            begin = end
