"""What the shell keeps of each live request: its tokens, and who reads it.

The core is token-blind; these are the bytes that the shell joins to its commands.
"""

from collections.abc import Iterator
from typing import Protocol

from tidegate.ipc.protocol import RequestId, Row, Sampling, Start, StreamId, Submit
from tidegate.scheduler.commands import StartRow

TOKEN_BYTES = 4


class LatestTokens(Protocol):
    """Keeps the latest tokens of the streams that rows feed."""

    def flush(self, row: Row) -> None:
        """Give the stream its latest tokens."""
        ...

    def end(self, row: Row) -> None:
        """The same, and the row feeds the stream no more."""
        ...


class Stream:
    """One live request of one client. `request_id` is the scheduler's own name for it."""

    def __init__(
        self,
        request_id: RequestId,
        stream_id: StreamId,
        peer: bytes,
        submit: Submit,
        sampling: Sampling,
    ) -> None:
        self.request_id = request_id
        self.stream_id = stream_id
        self.peer = peer
        self.client_request_id = submit.request_id
        self.prompt = submit.prompt
        self.peer_number = 0  # Of its connection, as long as that has a stream.
        self._output = bytearray()
        self._row: tuple[LatestTokens, Row] | None = None
        self.sampling = sampling
        self.stop_ids = submit.stop_ids
        self.ignore_eos = submit.ignore_eos

    @property
    def output(self) -> bytes:
        """All tokens that it has brought."""
        if self._row is not None:
            latest, row = self._row
            latest.flush(row)
        return bytes(self._output)

    def add_output(self, tokens: bytes) -> None:
        self._output += tokens

    def take_row(self, latest: LatestTokens, row: Row) -> None:
        """Its latest tokens are those of the row from now on."""
        self._row = latest, row

    def leave_row(self) -> None:
        if self._row is not None:
            latest, row = self._row
            latest.end(row)
            self._row = None

    def start(self, row: StartRow) -> Start:
        """The wire's `Start`: the core's, with the tokens that the row has to feed."""
        prompt_tokens = len(self.prompt) // TOKEN_BYTES
        begin = row.position * TOKEN_BYTES
        if row.position < prompt_tokens:
            tokens = self.prompt[begin:] + self.output
        else:
            tokens = self.output[begin - len(self.prompt) :]
        return Start(
            row=row.row,
            request_id=row.request_id,
            position=row.position,
            tokens=tokens,
            output_index=row.output_index,
            limit=row.limit,
            pages=row.pages,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
            ignore_eos=self.ignore_eos,
        )


class Streams:
    """Live requests by the scheduler's name, and by their client's own."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, Stream] = {}
        self._by_peer: dict[bytes, dict[RequestId, Stream]] = {}
        self._peer_numbers: dict[bytes, int] = {}
        self._next_peer_number = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Stream]:
        return iter(tuple(self._by_id.values()))

    def add(self, stream: Stream) -> None:
        self._by_id[stream.request_id] = stream
        self._by_peer.setdefault(stream.peer, {})[stream.client_request_id] = stream
        if stream.peer not in self._peer_numbers:
            self._next_peer_number += 1
            self._peer_numbers[stream.peer] = self._next_peer_number
        stream.peer_number = self._peer_numbers[stream.peer]

    def get(self, request_id: RequestId) -> Stream:
        return self._by_id[request_id]

    def of_client(self, peer: bytes, client_request_id: RequestId) -> Stream | None:
        return self._by_peer.get(peer, {}).get(client_request_id)

    def remove(self, request_id: RequestId) -> Stream:
        stream = self._by_id.pop(request_id)
        stream.leave_row()
        mine = self._by_peer[stream.peer]
        del mine[stream.client_request_id]
        if not mine:
            del self._by_peer[stream.peer]
            del self._peer_numbers[stream.peer]
        return stream

    def peers(self) -> tuple[bytes, ...]:
        """Connections that have a live request."""
        return tuple(self._by_peer)
