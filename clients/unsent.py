"""Frames that the scheduler has not taken yet, in order, so that sending never waits."""

from collections import deque
from typing import NoReturn

import trio

from tidegate.ipc.peer_link import PeerLink

FRAME_COUNT_MAX = 2048
BYTES_MAX = 256 * 1024 * 1024


class Unsent:
    """A queue in front of a link. `run` empties it."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link
        self._frames: deque[bytes] = deque()
        self._byte_count = 0
        self._has_frames = trio.Event()

    def has_room(self, byte_count: int) -> bool:
        """Whether a new request of this size may be sent.

        Cancels and questions are always let through: at most one of each is on its way for each
        request that was sent.
        """
        return (
            len(self._frames) < FRAME_COUNT_MAX and self._byte_count + byte_count <= BYTES_MAX
        )

    def send(self, frame: bytes) -> None:
        """Send the frame now, or queue it behind the others."""
        if not self._frames:
            try:
                self._link.send_nowait(frame)
            except trio.WouldBlock:
                pass
            else:
                return
        self._frames.append(frame)
        self._byte_count += len(frame)
        self._has_frames.set()

    async def run(self) -> NoReturn:
        """Send what is queued, as the scheduler takes it."""
        while True:
            await self._has_frames.wait()
            while self._frames:
                await self._link.send(self._frames[0])
                self._byte_count -= len(self._frames.popleft())
            self._has_frames = trio.Event()
