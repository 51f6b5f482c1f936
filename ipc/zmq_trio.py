"""ZeroMQ sockets for trio.

Life cycle:

1. `zmq_context.open_context()` gives this process's one ZeroMQ context.
2. `Socket(context, kind, **options)`, then a `Monitor` if wanted, then `bind` or `connect`.
3. Tasks send and receive, any number of them at once; each call is a checkpoint.
4. `close()`, or leaving `async with`. Tasks that wait get `trio.ClosedResourceError`.
5. Leaving `open_context()` for the last time closes whatever is still open.

How tasks wait for the socket is in `zmq_parking`.
Sends keep the order in which they were called (a ROUTER: for each peer), and so do receives.
A cancelled call has either happened in full, and returned, or not happened at all.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import zmq

from tidegate.ipc.zmq_context import Context, SocketOption
from tidegate.ipc.zmq_parking import Parking

RECEIVE_COUNT_MAX = 256  # Messages that one `recv_many` takes at most, unless told.

NOBLOCK = int(zmq.NOBLOCK)


class Socket:
    """One ZeroMQ socket, used by tasks of one trio run.

    `options` are socket options by their lower-case names, set before anything else:
    `Socket(context, zmq.DEALER, sndhwm=100)`. An unknown name raises `AttributeError`.
    """

    def __init__(self, context: Context, kind: int, **options: SocketOption) -> None:
        # Made by the context's own method, so that the context knows it and can close it.
        raw = context.socket(kind)
        try:
            raw.linger = 0
            for name, value in options.items():
                setattr(raw, name, value)
        except BaseException:
            raw.close(0)
            raise
        self._adopt(raw)

    @classmethod
    def adopt(cls, raw: "zmq.Socket[bytes]") -> Self:
        """Take over a plain socket, which nobody else uses from now on."""
        socket = cls.__new__(cls)
        socket._adopt(raw)
        return socket

    def _adopt(self, raw: "zmq.Socket[bytes]") -> None:
        self.raw = raw
        self.parking = Parking(raw)
        self._is_router = raw.get(zmq.TYPE) == zmq.ROUTER

    # --- Sending ---

    async def send_multipart(self, parts: Sequence[bytes]) -> None:
        """Send one message of these parts, when there is room for it.

        On a ROUTER the first part is the peer's identity, and a full peer holds up only
        senders to that same peer. Raises `zmq.ZMQError` with errno `EHOSTUNREACH` if a
        ROUTER with `router_mandatory` has no such peer.
        """

        def call() -> None:
            # Only the first part can meet a full queue: the rest belongs to it.
            self.raw.send_multipart(parts, NOBLOCK)

        peer = parts[0] if self._is_router else None
        await self.parking.perform(self.parking.senders, call, peer)

    async def send(self, data: bytes) -> None:
        """Send one message of one part, when there is room for it."""
        await self.send_multipart([data])

    def send_nowait(self, parts: Sequence[bytes]) -> None:
        """Send now, or raise `trio.WouldBlock` if there is no room or others wait to send.

        Synchronous: for use inside a step that must not be interrupted.
        """

        def call() -> None:
            self.raw.send_multipart(parts, NOBLOCK)

        peer = parts[0] if self._is_router else None
        self.parking.perform_now(self.parking.senders, call, peer)

    # --- Receiving ---

    async def recv_multipart(self) -> list[bytes]:
        """The next message, as its parts."""

        def call() -> list[bytes]:
            return self.raw.recv_multipart(NOBLOCK)

        return await self.parking.perform(self.parking.readers, call)

    async def recv(self) -> bytes:
        """The next message, which must have one part; more of them raise `ValueError`."""
        parts = await self.recv_multipart()
        if len(parts) != 1:
            raise ValueError(f"a message of one part was expected, not of {len(parts)}")
        return parts[0]

    async def recv_many(self, limit: int = RECEIVE_COUNT_MAX) -> list[list[bytes]]:
        """All messages that are there now, at least one and at most `limit`.

        One checkpoint for the whole batch.
        """

        def call() -> list[list[bytes]]:
            messages = [self.raw.recv_multipart(NOBLOCK)]
            try:
                while len(messages) < limit:
                    messages.append(self.raw.recv_multipart(NOBLOCK))
            except zmq.Again:
                pass
            return messages

        return await self.parking.perform(self.parking.readers, call)

    # --- Life ---

    def bind(self, endpoint: str) -> None:
        """Raises `zmq.ZMQError`. See `endpoints.bind_endpoint` for a careful bind."""
        try:
            self.raw.bind(endpoint)
        finally:
            self.parking.serve_parked()

    def connect(self, endpoint: str) -> None:
        """Begin to connect; the library goes on trying. Raises `zmq.ZMQError`."""
        try:
            self.raw.connect(endpoint)
        finally:
            self.parking.serve_parked()

    def set(self, option: int, value: int | bytes) -> None:
        """Set a socket option by its number."""
        self.raw.set(option, value)
        self.parking.serve_parked()

    def get(self, option: int) -> int | bytes:
        """Read a socket option by its number."""
        value = self.raw.get(option)
        self.parking.serve_parked()
        return value

    @property
    def closed(self) -> bool:
        return self.raw.closed

    def close(self, linger_ms: int = 0) -> None:
        """Close at once; closing twice is allowed.

        Messages that were sent but have not left this process yet are given `linger_ms`:
        the library sends them in the background, and the context waits for it at its end.
        """
        if self.raw.closed:
            return
        self.parking.close()
        self.raw.close(linger_ms)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
