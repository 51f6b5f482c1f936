"""Messages for clients, gathered over a turn: one tokens frame for each connection."""

from tidegate.ipc.protocol import NewTokens, SchedulerToClient, StreamId, pack_ids
from tidegate.scheduler.streams import TOKEN_BYTES


class _Pending:
    """Tokens of several streams of one connection, not yet a message."""

    def __init__(self) -> None:
        self.streams: list[StreamId] = []
        self.first_indexes: list[int] = []
        self.counts: list[int] = []
        self.tokens: list[bytes] = []

    def message(self) -> NewTokens:
        return NewTokens(
            pack_ids(self.streams),
            pack_ids(self.first_indexes),
            pack_ids(self.counts),
            b"".join(self.tokens),
        )


class Outgoing:
    """Keeps the order of each connection's messages; tokens in a row become one frame."""

    def __init__(self) -> None:
        self._messages: dict[bytes, list[SchedulerToClient]] = {}
        self._pending: dict[bytes, _Pending] = {}

    def add(self, peer: bytes, message: SchedulerToClient) -> None:
        self._close(peer)
        self._messages.setdefault(peer, []).append(message)

    def add_tokens(
        self, peer: bytes, stream: StreamId, first_index: int, tokens: bytes
    ) -> None:
        pending = self._pending.setdefault(peer, _Pending())
        pending.streams.append(stream)
        pending.first_indexes.append(first_index)
        pending.counts.append(len(tokens) // TOKEN_BYTES)
        pending.tokens.append(tokens)

    def take(self) -> list[tuple[bytes, list[SchedulerToClient]]]:
        """Everything gathered, by connection. The outbox is empty afterwards."""
        for peer in tuple(self._pending):
            self._close(peer)
        messages, self._messages = self._messages, {}
        return list(messages.items())

    def _close(self, peer: bytes) -> None:
        pending = self._pending.pop(peer, None)
        if pending is not None:
            self._messages.setdefault(peer, []).append(pending.message())
