"""The other side of a link for trio programs: one connection to the scheduler.

The connection comes and goes by itself: the socket goes on trying to connect, and frames that
were sent meanwhile wait in a bounded queue. `wait_disconnected` tells of a loss at once; what
it means for the requests that were running is for the caller to say.
"""

import secrets
from types import TracebackType
from typing import Self

import zmq

from tidegate.ipc.endpoints import check_endpoint
from tidegate.ipc.link_options import RECEIVE_COUNT_MAX, LinkOptions, check_frame
from tidegate.ipc.zmq_context import Context
from tidegate.ipc.zmq_monitor import Monitor
from tidegate.ipc.zmq_trio import Socket

IDENTITY_BYTES = 16


class PeerLink:
    """Frames to and from the scheduler, used by tasks of one trio run.

    Raises `endpoints.EndpointError` for an endpoint that is none. Without `identity`, one is
    drawn at random: who knows it can take the connection's place.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        options: LinkOptions | None = None,
        identity: bytes | None = None,
    ) -> None:
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self.identity = identity or random_identity()
        self.malformed_count = 0
        sets = (options or LinkOptions()).for_socket()
        self._socket = Socket(context, zmq.DEALER, identity=self.identity, **sets)
        self._monitor = Monitor(self._socket)
        self._socket.connect(endpoint)

    async def send(self, frame: bytes) -> None:
        """Send the frame, when there is room for it: no bound on the wait but the caller's.

        Raises `FrameTooLargeError`, or `trio.ClosedResourceError`.
        """
        check_frame(frame)
        await self._socket.send(frame)

    def send_nowait(self, frame: bytes) -> None:
        """Send the frame, or raise `trio.WouldBlock` if there is no room."""
        check_frame(frame)
        self._socket.send_nowait([frame])

    async def receive(self) -> list[bytes]:
        """Wait for frames. Never an empty list. Raises `trio.ClosedResourceError`."""
        while True:
            messages = await self._socket.recv_many(RECEIVE_COUNT_MAX)
            frames = [message[0] for message in messages if len(message) == 1]
            self.malformed_count += len(messages) - len(frames)
            if frames:
                return frames

    async def wait_connected(self) -> None:
        """Return when the scheduler has answered the handshake; at once if it has."""
        await self._monitor.wait_connected()

    async def wait_disconnected(self) -> None:
        """Return when an established connection is lost; at once if it is lost now."""
        await self._monitor.wait_disconnected()

    def close(self, linger_ms: int = 0) -> None:
        """Close at once. What was sent and has not left yet is given `linger_ms`."""
        self._monitor.close()
        self._socket.close(linger_ms)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def random_identity() -> bytes:
    """An identity that nobody can guess. It does not begin with the zero that is reserved."""
    return secrets.token_hex(IDENTITY_BYTES).encode()
