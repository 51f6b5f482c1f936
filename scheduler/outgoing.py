"""Messages for clients, gathered over a turn: one tokens frame for each connection."""

from tidegate.ipc.protocol import NewTokens, SchedulerToClient
from tidegate.scheduler.row_streams import Delivery


class _Pending:
    """Tokens of several streams of one connection, not yet a message."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []

    def message(self) -> NewTokens:
        each = self.deliveries
        return NewTokens(
            b"".join([delivery.streams for delivery in each]),
            b"".join([delivery.first_indexes for delivery in each]),
            b"".join([delivery.counts for delivery in each]),
            b"".join([delivery.tokens for delivery in each]),
        )


class Outgoing:
    """Keeps the order of each connection's messages; tokens in a row become one frame."""

    def __init__(self) -> None:
        self._messages: dict[bytes, list[SchedulerToClient]] = {}
        self._pending: dict[bytes, _Pending] = {}

    def add(self, peer: bytes, message: SchedulerToClient) -> None:
        self._close(peer)
        self._messages.setdefault(peer, []).append(message)

    def deliver(self, delivery: Delivery) -> None:
        self._pending.setdefault(delivery.peer, _Pending()).deliveries.append(delivery)

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
