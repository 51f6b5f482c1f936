"""What the shell asks of a link: many peers, whole frames, sends that never wait."""

from enum import Enum, auto
from typing import Protocol


class SendOutcome(Enum):
    SENT = auto()  # Handed to the socket, or queued in the peer's bounded outbox.
    GONE = auto()  # There is no such peer any more.
    FULL = auto()  # The peer's outbox is at its bound: it reads too slowly.


class Link(Protocol):
    """Frames to and from many peers. Frames to one peer arrive in order."""

    async def receive(self) -> list[tuple[bytes, bytes]]:
        """Wait for frames; each with its peer's identity."""
        ...

    def send(self, peer: bytes, frame: bytes) -> SendOutcome: ...

    def take_gone(self) -> list[bytes]:
        """Peers found gone since the last call, while their outboxes were emptied."""
        ...
