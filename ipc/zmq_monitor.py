"""Tells at once when a socket's connection comes or goes, on `ipc://` and `tcp://` alike."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import trio

from tidegate.ipc.zmq_connection import CONNECTION_EVENTS, Connection
from tidegate.ipc.zmq_trio import Socket


class Monitor:
    """Waits for the connection of a socket that connects to one endpoint.

    Make it before `connect`, so that nothing is missed, and close it before the socket.
    Events wait here until somebody asks; several tasks may ask at a time.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._events = Socket.adopt(socket.raw.get_monitor_socket(CONNECTION_EVENTS))
        self._connection = Connection()
        self._turn = trio.Lock()

    async def wait_connected(self) -> None:
        """Return when the other side has answered the handshake; at once if it is up."""
        await self._wait(lambda: self._connection.up)

    async def wait_disconnected(self) -> None:
        """Return when an established connection is lost; at once if it is lost now.

        A loss that nobody has heard of yet counts, even if the connection is up again. The
        socket goes on trying to connect: a later `wait_connected` tells of it.
        """
        connection, before = self._connection, self._connection.loss_count
        await self._wait(lambda: connection.loss_count > before or connection.lost)

    async def _wait(self, holds: Callable[[], bool]) -> None:
        # One task at a time reads one event; then the others look again.
        while not holds():
            async with self._turn:
                if not holds():
                    self._connection.apply(await self._events.recv_multipart())

    def close(self) -> None:
        """Waiting tasks get `trio.ClosedResourceError`."""
        if not self._socket.closed:
            self._socket.raw.disable_monitor()
        self._events.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
