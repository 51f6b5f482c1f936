"""One HTTP request and its response, over ASGI.

1. The body is read to its end and counted while it comes.
2. From then on `watch` waits for the client to go away.
3. One response is sent (`respond`), or a stream is begun and fed, and ended with `end_stream`.
4. A client that takes nothing for `stall_ms_max` while something is being sent is cut off.
"""

import math
from collections.abc import Callable

import trio

from tidegate.clients.proxy.asgi import AsgiMessage, Headers, Receive, Scope, Send
from tidegate.clients.proxy.body import Share
from tidegate.clients.proxy.cut import cut_connections
from tidegate.clients.proxy.errors import ApiError
from tidegate.ipc.log_line import LogValue

BODY_MS_MAX = 120_000  # From the first byte of a body to its last.
DRAIN_MS_MAX = 10_000  # For a body that is not wanted, so that its sender reads the answer.
DRAIN_BYTES_MAX = 256 * 1024 * 1024

CLOSE = (b"connection", b"close")
JSON = (b"content-type", b"application/json")
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
NO_CACHE = (b"cache-control", b"no-cache")


class ClientGone(Exception):
    """The HTTP client closed the connection, or was cut off. Nothing more can be sent."""


class Exchange:
    """`http_id` is the exchange's own name, which no client chooses."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, http_id: str, stall_ms_max: int
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.http_id = http_id
        self.status = 0  # Of the response, once it has begun.
        self.is_over = False
        self.is_stalled = False
        self.when_gone: list[Callable[[], None]] = []  # What must end with the client.
        self.notes: dict[str, LogValue] = {}  # For the log.
        self.is_gone = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._stall_s_max = stall_ms_max / 1000
        self._sending_since = math.inf
        self._turn = trio.Lock()  # Several tasks may feed one stream.
        self._body_ended = False
        self._headers: Headers = [(b"x-request-id", http_id.encode())]

    def header(self, name: bytes) -> bytes:
        """A header of the request by its lower-case name; empty if it has none."""
        headers: Headers = self._scope["headers"]
        return next((value for key, value in headers if key == name), b"")

    def add_header(self, name: bytes, value: str) -> None:
        """A header for the response, which has not begun."""
        self._headers.append((name, value.encode()))

    def note(self, **notes: LogValue) -> None:
        """Add to what the log will tell of this exchange."""
        self.notes.update(notes)

    # --- The request ---

    async def read_body(self, share: Share) -> bytes:
        """The whole body, within `share`. Raises `ApiError` and `ClientGone`."""
        chunks: list[bytes] = []
        try:
            with trio.move_on_after(BODY_MS_MAX / 1000):
                while not self._body_ended:
                    chunk = await self._receive_body()
                    share.take(len(chunk))
                    chunks.append(chunk)
        except ApiError:
            chunks.clear()  # The error's traceback would keep them until it is answered.
            share.release()
            raise
        if not self._body_ended:
            raise ApiError(
                408, f"the body did not arrive within {BODY_MS_MAX} ms", code="body_too_slow"
            )
        return b"".join(chunks)

    async def watch(self) -> None:
        """Return when the client is gone, or takes nothing. The body must have ended."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_stall, nursery.cancel_scope)
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if self.is_over:
                # The server says the same when a response is complete, and while its last
                # part is being sent.
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()
        self.is_gone = True

    async def _watch_stall(self, scope: trio.CancelScope) -> None:
        while True:
            await trio.sleep(self._stall_s_max / 10)
            if trio.current_time() - self._sending_since >= self._stall_s_max:
                self.is_stalled = True
                scope.cancel()

    def cut_if_sending(self) -> None:
        """Make a send fail that waits for a client which is gone or takes nothing."""
        if self._sending_since == math.inf:
            return
        server, client = self._scope.get("server"), self._scope.get("client")
        if server and client:
            cut_connections(server[1], (client[0], client[1]))

    async def _receive_body(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_gone = True
            raise ClientGone
        self._body_ended = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def _drain(self) -> None:
        """Let the client finish sending what nobody wants, within bounds."""
        byte_count = 0
        with trio.move_on_after(DRAIN_MS_MAX / 1000):
            while not self._body_ended and byte_count < DRAIN_BYTES_MAX:
                byte_count += len(await self._receive_body())

    # --- The response ---

    async def respond(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """Send a whole response, JSON unless `headers` say otherwise."""
        length = (b"content-length", str(len(body)).encode())
        closing = [] if self._body_ended else [CLOSE]
        await self._begin(status, [*(headers or [JSON]), length, *closing])
        if not self._body_ended:
            # Who is still sending reads the answer only if the connection stays up till then.
            await self._feed({"type": "http.response.body", "body": body, "more_body": True})
            await self._drain()
            body = b""
        self.is_over = True
        await self._feed({"type": "http.response.body", "body": body, "more_body": False})

    async def send_events(self, events: bytes) -> None:
        """Send events; the first ones begin the stream."""
        async with self._turn:
            if self.status == 0:
                await self._begin(200, [EVENT_STREAM, NO_CACHE])
            await self._feed({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, events: bytes) -> None:
        """Send the last events and end the stream."""
        async with self._turn:
            self.is_over = True
            await self._feed({"type": "http.response.body", "body": events, "more_body": False})

    async def _begin(self, status: int, headers: Headers) -> None:
        self.status = status
        start: AsgiMessage = {
            "type": "http.response.start",
            "status": status,
            "headers": [*self._headers, *headers],
        }
        await self._feed(start)

    async def _feed(self, message: AsgiMessage) -> None:
        if self.is_gone:
            raise ClientGone
        self._sending_since = trio.current_time()
        try:
            await self._send(message)
        finally:
            self._sending_since = math.inf
