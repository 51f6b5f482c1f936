"""The scheduler's side of a link: one socket, many peers, and none that delays another.

A frame for a peer:

1. It goes straight into ZeroMQ's queue for that peer, if nothing waits for the peer here.
2. If that queue is full, it waits in the peer's outbox, behind the frames before it.
3. `run` moves frames from outboxes to the socket, for each peer in order.
4. If the outbox is at its bound, the caller hears `FULL`, and should end what it does for this
   peer. If the peer is gone, the caller hears `GONE`, or finds it in `take_gone`.

A ROUTER socket reports that it can be written to whatever its peers' state, so nothing can be
waited for in step 3: `run` tries again, at first after a millisecond.
"""

from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

import trio
import zmq

from tidegate.ipc.endpoints import bind_endpoint
from tidegate.ipc.link_options import RECEIVE_COUNT_MAX, LinkOptions, check_frame
from tidegate.ipc.outbox import OutboxBounds, Outboxes, SendOutcome
from tidegate.ipc.zmq_context import Context
from tidegate.ipc.zmq_trio import Socket

FLUSH_INTERVAL_S_MIN = 0.001
FLUSH_INTERVAL_S_MAX = 0.02
FLUSH_FRAMES_MAX = 64  # For one peer before the next has its turn.


class ServerLink:
    """Frames to and from many peers, each known by its connection's identity.

    Binds `endpoint`; raises `endpoints.EndpointError`. A peer that comes back under its old
    identity takes it over, so that a half-dead connection cannot lock it out. Identities are
    therefore secrets: peers draw them at random (`PeerLink`) or tell them to nobody.

    A message that is not one non-empty frame of at most `receive_bytes_max` bytes is counted,
    told to `on_malformed(peer, what)`, and dropped.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        options: LinkOptions | None = None,
        bounds: OutboxBounds | None = None,
        on_malformed: Callable[[bytes, str], None] | None = None,
    ) -> None:
        self._options = options or LinkOptions()
        self._outboxes = Outboxes(bounds or OutboxBounds())
        self._on_malformed = on_malformed
        self._gone: list[bytes] = []
        self._queued = trio.Event()  # Set while something waits in an outbox.
        self.malformed_count = 0
        self._socket = Socket(
            context,
            zmq.ROUTER,
            router_mandatory=1,
            router_handover=1,
            **self._options.for_socket(),
        )
        try:
            self._bound = bind_endpoint(self._socket, endpoint)
        except BaseException:
            self._socket.close()
            raise
        self.address = self._bound.address

    async def receive(self) -> list[tuple[bytes, bytes]]:
        """Wait for frames; each comes with its peer's identity. Never an empty list."""
        while True:
            messages = await self._socket.recv_many(RECEIVE_COUNT_MAX)
            frames = [
                (message[0], message[1]) for message in messages if self._well_formed(message)
            ]
            if frames:
                return frames

    def _well_formed(self, message: list[bytes]) -> bool:
        if len(message) != 2:
            what = f"a message of {len(message) - 1} frames instead of one"
        elif not message[1]:
            what = "an empty frame"
        elif len(message[1]) > self._options.receive_bytes_max:
            what = f"a frame of {len(message[1])} bytes"
        else:
            return True
        self.malformed_count += 1
        if self._on_malformed is not None:
            self._on_malformed(message[0], what)
        return False

    def send(self, peer: bytes, frame: bytes) -> SendOutcome:
        """Send or queue the frame; never waits. Frames to one peer arrive in order.

        After `FULL`, more frames for this peer are turned away until it has taken all that
        waits for it, or `discard` was called. Raises `FrameTooLargeError`.
        """
        check_frame(frame)
        if peer not in self._outboxes:
            outcome = self._send_now(peer, frame)
            if outcome is not SendOutcome.FULL:
                return outcome
        if not self._outboxes.add(peer, frame):
            return SendOutcome.FULL
        self._queued.set()
        return SendOutcome.SENT

    def _send_now(self, peer: bytes, frame: bytes) -> SendOutcome:
        """Here, `FULL` is said of ZeroMQ's own queue."""
        try:
            self._socket.send_nowait([peer, frame])
        except trio.WouldBlock:
            return SendOutcome.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return SendOutcome.GONE
            raise
        return SendOutcome.SENT

    def take_gone(self) -> list[bytes]:
        """Peers found gone since the last call, while their outboxes were emptied."""
        gone, self._gone = self._gone, []
        return gone

    def waiting_count(self, peer: bytes) -> int:
        """Frames in the peer's outbox, which ZeroMQ has no room for."""
        return self._outboxes.count(peer)

    def discard(self, peer: bytes) -> int:
        """Drop what waits for the peer. Returns how many frames that were."""
        return self._outboxes.discard(peer)

    @property
    def queued_byte_count(self) -> int:
        """Bytes in all outboxes."""
        return self._outboxes.byte_count

    async def run(self) -> NoReturn:
        """Empty outboxes as peers take frames. Runs as long as the link is used."""
        while True:
            await self._queued.wait()
            pause_s = FLUSH_INTERVAL_S_MIN
            while self._outboxes:
                progress = self._flush()
                pause_s = FLUSH_INTERVAL_S_MIN if progress else pause_s * 2
                await trio.sleep(min(pause_s, FLUSH_INTERVAL_S_MAX))
            self._queued = trio.Event()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all outboxes are empty. False if they are not after `timeout_s`."""
        with trio.move_on_after(timeout_s):
            while self._outboxes:
                self._flush()
                await trio.sleep(FLUSH_INTERVAL_S_MIN)
        return not self._outboxes

    def _flush(self) -> bool:
        """Try each peer for whom something waits. True if a frame went, or a peer is gone."""
        progress = False
        for peer in self._outboxes.peers():
            for _ in range(FLUSH_FRAMES_MAX):
                frame = self._outboxes.head(peer)
                if frame is None:
                    break
                outcome = self._send_now(peer, frame)
                if outcome is SendOutcome.FULL:
                    break
                progress = True
                if outcome is SendOutcome.GONE:
                    self._outboxes.discard(peer)
                    self._gone.append(peer)
                    break
                self._outboxes.pop(peer)
        return progress

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket and remove its files. What waits in outboxes is dropped.

        What ZeroMQ has taken already is given `linger_ms` to leave; `flush` comes before. A
        peer whose own queue is full at that moment may lose the end, but not notice of it:
        ZeroMQ reads a closed connection no further once it had to pause.
        """
        self._socket.close(linger_ms)
        self._bound.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
