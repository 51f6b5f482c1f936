"""What the shell asks of a link: many peers, whole frames, sends that never wait."""

from typing import Protocol

from tidegate.ipc.outbox import SendOutcome as SendOutcome


class Link(Protocol):
    """Frames to and from many peers. Frames to one peer arrive in order."""

    async def receive(self) -> list[tuple[bytes, bytes]]:
        """Wait for frames; each with its peer's identity."""
        ...

    def send(self, peer: bytes, frame: bytes) -> SendOutcome: ...

    def waiting_count(self, peer: bytes) -> int:
        """Frames that wait here for the peer, because it does not take them."""
        ...

    def take_gone(self) -> list[bytes]:
        """Peers found gone since the last call, while their outboxes were emptied."""
        ...
