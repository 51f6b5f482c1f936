"""Waits until a server can answer a request."""

import trio

from tidegate.cli.supervisor import NotReady
from tidegate.clients.library import AsyncClient, ClientError
from tidegate.ipc.protocol import Status

READY_TIMEOUT_S = 1800.0  # Large checkpoints take minutes to load.
CONNECT_MS_MAX = 60_000
POLL_S = 0.05
HEALTH_TIMEOUT_S = 5.0
HEALTH_BYTES_MAX = 65536


async def wait_ready(
    client_endpoint: str, host: str, port: int, timeout_s: float = READY_TIMEOUT_S
) -> Status:
    """The scheduler's status, once a token can flow and the proxy says so over HTTP.

    Raises `NotReady`, which says what was missing, after `timeout_s`.
    """
    missing = "the scheduler does not answer"
    with trio.move_on_after(timeout_s):
        try:
            async with AsyncClient(client_endpoint, connect_ms_max=CONNECT_MS_MAX) as client:
                while not (status := await client.status()).ready:
                    missing = status.reason
                    await trio.sleep(POLL_S)
        except ClientError as error:
            raise NotReady(f"the scheduler does not answer: {error}") from None
        missing = "the HTTP proxy does not answer"
        # Another process answers: it can only be asked again.
        while not await is_healthy(host, port):  # noqa: ASYNC110
            await trio.sleep(POLL_S)
        return status
    raise NotReady(f"not ready after {timeout_s:g} s: {missing}")


async def is_healthy(host: str, port: int) -> bool:
    """Whether `GET /health` is answered with 200."""
    request = f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    try:
        with trio.fail_after(HEALTH_TIMEOUT_S):
            stream = await trio.open_tcp_stream(host, port)
            async with stream:
                await stream.send_all(request.encode())
                answer = await stream.receive_some(HEALTH_BYTES_MAX)
    except (OSError, trio.BrokenResourceError, trio.TooSlowError):
        return False
    return answer.split(b" ")[1:2] == [b"200"]
