"""Opens the connection to the scheduler, and sees to its end."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from tidegate.clients.connection import SILENCE_MS_MAX, Connection
from tidegate.clients.errors import ConnectFailed, ServerLost
from tidegate.ipc.endpoints import EndpointError, check_endpoint
from tidegate.ipc.peer_link import PeerLink
from tidegate.ipc.zmq_context import open_context

CONNECT_MS_MAX = 5_000
LINGER_MS = 200  # For the last cancels to leave.


@asynccontextmanager
async def open_connection(
    endpoint: str,
    connect_ms_max: int = CONNECT_MS_MAX,
    silence_ms_max: int = SILENCE_MS_MAX,
) -> AsyncGenerator[Connection]:
    """A running connection. Raises `ConnectFailed` when no scheduler answers in time."""
    try:
        check_endpoint(endpoint)
    except EndpointError as error:
        raise ConnectFailed(str(error)) from None
    failure: BaseException | None = None
    with open_context() as context:
        link = PeerLink(context, endpoint)
        try:
            async with trio.open_nursery() as nursery:
                connection = Connection(link, silence_ms_max)
                try:
                    await _wait_connected(link, connect_ms_max)
                    nursery.start_soon(connection.run)
                    yield connection
                except BaseException as error:
                    # Raised in here, it would come out of the nursery as an exception group.
                    failure = error
                connection.fail_all(ServerLost("this client was closed"))
                nursery.cancel_scope.cancel()
        finally:
            link.close(LINGER_MS)
    if failure is not None:
        raise failure


async def _wait_connected(link: PeerLink, connect_ms_max: int) -> None:
    with trio.move_on_after(connect_ms_max / 1000):
        await link.wait_connected()
        return
    raise ConnectFailed(
        f"no scheduler answers at {link.endpoint} within {connect_ms_max} ms: start one with "
        "`tidegate serve`, and name its endpoint, which it prints, here or in TIDEGATE_ENDPOINT"
    )
