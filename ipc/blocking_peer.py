"""The other side of a link for a plain loop without trio: a worker between its steps."""

from types import TracebackType
from typing import Self

import zmq

from tidegate.ipc.endpoints import check_endpoint
from tidegate.ipc.link_options import (
    RECEIVE_COUNT_MAX,
    LinkOptions,
    SendTimeoutError,
    check_frame,
)
from tidegate.ipc.zmq_connection import CONNECTION_EVENTS, Connection
from tidegate.ipc.zmq_context import Context

SEND_TIMEOUT_MS = 5000

NOBLOCK = int(zmq.NOBLOCK)


class BlockingPeer:
    """Frames to and from the scheduler, used by one thread.

    `identity` names this peer to the scheduler's socket; who knows it can take its place.
    Raises `endpoints.EndpointError` for an endpoint that is none.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        identity: bytes,
        options: LinkOptions | None = None,
        send_timeout_ms: int = SEND_TIMEOUT_MS,
    ) -> None:
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self.malformed_count = 0
        self._send_timeout_ms = send_timeout_ms
        self._connection = Connection()
        self._socket = context.socket(zmq.DEALER)
        try:
            self._socket.linger = 0
            self._socket.set(zmq.IDENTITY, identity)
            self._socket.set(zmq.SNDTIMEO, send_timeout_ms)
            for name, value in (options or LinkOptions()).for_socket().items():
                setattr(self._socket, name, value)
            self._events = self._socket.get_monitor_socket(CONNECTION_EVENTS)
            self._socket.connect(endpoint)
        except BaseException:
            self._socket.close(0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)

    def poll(self, timeout_ms: int) -> bool:
        """Wait for a frame, for at most `timeout_ms`. True if there is one.

        Returns early, with False, when the connection comes or goes.
        """
        ready = dict(self._poller.poll(timeout_ms))
        self._read_events()
        return self._socket in ready

    def receive_all(self, limit: int = RECEIVE_COUNT_MAX) -> list[bytes]:
        """The frames that are there, at most `limit`. Does not wait."""
        frames: list[bytes] = []
        while len(frames) < limit:
            try:
                message = self._socket.recv_multipart(NOBLOCK)
            except zmq.Again:
                break
            if len(message) == 1:
                frames.append(message[0])
            else:
                self.malformed_count += 1
        return frames

    def send(self, frame: bytes) -> None:
        """Send the frame. Raises `FrameTooLargeError`.

        Waits for room as long as `send_timeout_ms`, then raises `SendTimeoutError`.
        """
        check_frame(frame)
        try:
            self._socket.send(frame)
        except zmq.Again:
            raise SendTimeoutError(
                f"{self.endpoint} took no frame for {self._send_timeout_ms} ms"
            ) from None

    @property
    def connected(self) -> bool:
        """Whether the connection is up, its handshake done. Does not wait."""
        self._read_events()
        return self._connection.up

    @property
    def lost(self) -> bool:
        """Whether a connection was established and has been lost, even if another is up now.

        Frames may be missing then: the scheduler is another one, or has forgotten this peer.
        """
        self._read_events()
        return self._connection.loss_count > 0

    def _read_events(self) -> None:
        while True:
            try:
                self._connection.apply(self._events.recv_multipart(NOBLOCK))
            except zmq.Again:
                return

    def close(self, linger_ms: int = 0) -> None:
        """Close at once. What was sent and has not left yet is given `linger_ms`."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close(0)
            self._socket.close(linger_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
