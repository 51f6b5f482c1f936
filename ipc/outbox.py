"""Frames that wait for peers who do not take them as fast as they come, within bounds.

An outbox exists while frames wait in it. At its bound it turns frames away, and goes on to do
so until its peer has taken all that waits: so no frame slips past one that was turned away.
"""

from collections import deque
from enum import Enum, auto

import msgspec

from tidegate.ipc.protocol import FRAME_BYTES_MAX


class SendOutcome(Enum):
    """What became of a frame."""

    SENT = auto()  # Handed to the socket, or queued in the peer's bounded outbox.
    GONE = auto()  # There is no such peer any more.
    FULL = auto()  # The peer's outbox is at its bound: it reads too slowly.


class OutboxBounds(msgspec.Struct, frozen=True):
    """For each peer, and for all of them together. Raises `ValueError` if they do not fit."""

    frame_count_max: int = 4096
    byte_count_max: int = FRAME_BYTES_MAX
    total_byte_count_max: int = 4 * FRAME_BYTES_MAX

    def __post_init__(self) -> None:
        if self.frame_count_max < 1:
            raise ValueError(f"frame_count_max is {self.frame_count_max}; it must be 1 or more")
        if not 1 <= self.byte_count_max <= self.total_byte_count_max:
            raise ValueError(
                f"byte_count_max is {self.byte_count_max}; it must be from 1 to"
                f" total_byte_count_max, which is {self.total_byte_count_max}"
            )


class Outbox:
    """The frames that wait for one peer, oldest first."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.byte_count = 0
        self.turned_away = False  # Since the outbox was last empty.


class Outboxes:
    """The outboxes of all peers of one link."""

    def __init__(self, bounds: OutboxBounds) -> None:
        self._bounds = bounds
        self._outboxes: dict[bytes, Outbox] = {}
        self.byte_count = 0  # Of all peers.

    def __len__(self) -> int:
        return len(self._outboxes)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._outboxes

    def peers(self) -> list[bytes]:
        """Peers for whom something waits, the longest waiting first."""
        return list(self._outboxes)

    def add(self, peer: bytes, frame: bytes) -> bool:
        """Put the frame behind the peer's others. False if it was turned away."""
        outbox = self._outboxes.get(peer) or Outbox()
        bounds = self._bounds
        if (
            outbox.turned_away
            or len(outbox.frames) >= bounds.frame_count_max
            or outbox.byte_count + len(frame) > bounds.byte_count_max
            or self.byte_count + len(frame) > bounds.total_byte_count_max
        ):
            outbox.turned_away = True
            return False
        outbox.frames.append(frame)
        outbox.byte_count += len(frame)
        self.byte_count += len(frame)
        self._outboxes[peer] = outbox
        return True

    def count(self, peer: bytes) -> int:
        """How many frames wait for the peer."""
        outbox = self._outboxes.get(peer)
        return 0 if outbox is None else len(outbox.frames)

    def head(self, peer: bytes) -> bytes | None:
        """The peer's oldest frame, which stays; None if nothing waits."""
        outbox = self._outboxes.get(peer)
        return None if outbox is None else outbox.frames[0]

    def pop(self, peer: bytes) -> None:
        """Take the peer's oldest frame away. There must be one."""
        outbox = self._outboxes[peer]
        frame = outbox.frames.popleft()
        outbox.byte_count -= len(frame)
        self.byte_count -= len(frame)
        if not outbox.frames:
            del self._outboxes[peer]

    def discard(self, peer: bytes) -> int:
        """Drop all that waits for the peer. Returns how many frames that were."""
        outbox = self._outboxes.pop(peer, None)
        if outbox is None:
            return 0
        self.byte_count -= outbox.byte_count
        return len(outbox.frames)

    def check(self) -> None:
        """Assert what must be true of the books."""
        for outbox in self._outboxes.values():
            assert outbox.frames
            assert outbox.byte_count == sum(map(len, outbox.frames))
            assert outbox.byte_count <= self._bounds.byte_count_max
            assert len(outbox.frames) <= self._bounds.frame_count_max
        assert self.byte_count == sum(o.byte_count for o in self._outboxes.values())
        assert self.byte_count <= self._bounds.total_byte_count_max
