"""The ASGI application: routes, and what becomes of a request whatever happens in it.

1. The path is looked up, and the body read within bounds.
2. The page's function runs, while a watcher waits for the client to go away. If it does, the
   page's generations are cancelled at once, then the function itself.
3. An error becomes an error response, or an error event if a stream has begun.
4. One log line tells of it, without any text of the request.
"""

import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import trio

from tidegate.clients.errors import ClientError
from tidegate.clients.proxy import pages
from tidegate.clients.proxy.asgi import Receive, Scope, Send
from tidegate.clients.proxy.backend import Backend
from tidegate.clients.proxy.body import BodyBudget, Share
from tidegate.clients.proxy.completions import complete_chat, complete_text
from tidegate.clients.proxy.errors import ApiError, ErrorBody, from_client_error
from tidegate.clients.proxy.exchange import JSON, ClientGone, Exchange
from tidegate.clients.proxy.settings import ProxySettings
from tidegate.clients.proxy.sse import event_of
from tidegate.ipc.log import Log
from tidegate.ipc.log_events import LogEvent

PATH_LENGTH_MAX = 100  # Of a path in the log and in errors.

Page = Callable[[Backend, Exchange], Awaitable[None]]
Form = Callable[[Backend, Exchange, bytes, Share], Awaitable[None]]

PAGES: dict[str, Page] = {
    "/": pages.root,
    "/health": pages.health,
    "/v1/models": pages.models,
}
FORMS: dict[str, Form] = {
    "/v1/completions": complete_text,
    "/v1/chat/completions": complete_chat,
}
ONE_MODEL = "/v1/models/"


class App:
    """`idle` tells when no request is running."""

    def __init__(self, backend: Backend, settings: ProxySettings, log: Log) -> None:
        self._backend = backend
        self._settings = settings
        self._log = log
        self._budget = BodyBudget(settings.body_bytes_max, settings.body_bytes_total_max)
        self._running = 0
        self._changed = trio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await _lifespan(receive, send)
            case _:  # A websocket, which is turned away.
                await send({"type": "websocket.close"})

    async def wait_idle(self) -> None:
        """Return when no request is running."""
        while self._running:
            await self._changed.wait()

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        exchange = Exchange(
            scope, receive, send, secrets.token_hex(8), self._settings.stall_ms_max
        )
        self._running += 1
        try:
            with self._budget.share() as share:
                await self._serve(exchange, share)
        finally:
            self._running -= 1
            self._changed.set()
            self._changed = trio.Event()
            self._tell(exchange, time.monotonic() - began)

    async def _serve(self, exchange: Exchange, share: Share) -> None:
        try:
            if self._running > self._settings.request_count_max:
                raise ApiError(503, "too many requests at a time", code="overloaded")
            body = await exchange.read_body(share)
        except ClientGone:
            return
        except ApiError as error:
            await self._fail(exchange, error)
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, exchange, nursery.cancel_scope)
            await self._answer(exchange, body, share)
            nursery.cancel_scope.cancel()

    async def _watch(self, exchange: Exchange, scope: trio.CancelScope) -> None:
        await exchange.watch()
        for close in exchange.when_gone:
            close()
        # A send that waits for this client cannot be cancelled, but it can be made to fail.
        exchange.cut_if_sending()
        scope.cancel()

    async def _answer(self, exchange: Exchange, body: bytes, share: Share) -> None:
        try:
            await self._route(exchange, body, share)
        except ClientGone:
            pass
        except ApiError as error:
            await self._fail(exchange, error)
        except ClientError as error:
            await self._fail(exchange, from_client_error(error))
        except Exception as error:
            self._log.exception(LogEvent.INTERNAL_ERROR, error, http_id=exchange.http_id)
            text = "the proxy failed on this request; its log says more"
            await self._fail(exchange, ApiError(500, text, code="internal_error"))

    async def _route(self, exchange: Exchange, body: bytes, share: Share) -> None:
        path = exchange.path
        form = FORMS.get(path)
        if form is not None:
            _check_method(exchange, "POST")
            _check_content_type(exchange)
            await form(self._backend, exchange, body, share)
            return
        page = PAGES.get(path)
        if page is None and not path.startswith(ONE_MODEL):
            text = f"there is nothing at {path[:PATH_LENGTH_MAX]}; the API is below /v1"
            raise ApiError(404, text, code="unknown_path")
        _check_method(exchange, "GET", "HEAD")
        if page is not None:
            await page(self._backend, exchange)
        else:
            await pages.one_model(self._backend, exchange, path.removeprefix(ONE_MODEL))

    async def _fail(self, exchange: Exchange, error: ApiError) -> None:
        """An error response, or an error event at the end of a stream that has begun."""
        exchange.note(code=error.code)
        if exchange.is_over:
            return
        with suppress(ClientGone):
            if exchange.status:
                fields = msgspec.structs.replace(error.fields, partial_text=None)
                await exchange.end_stream(event_of(ErrorBody(fields)))
            else:
                await exchange.respond(error.status, error.body(), [JSON, *error.headers()])

    def _tell(self, exchange: Exchange, duration_s: float) -> None:
        outcome = "answered" if exchange.is_over else "client_gone"
        level = self._log.debug if exchange.path in PAGES else self._log.info
        level(
            LogEvent.HTTP_REQUEST,
            http_id=exchange.http_id,
            method=exchange.method,
            path=exchange.path[:PATH_LENGTH_MAX],
            status=exchange.status,
            outcome="client_stalled" if exchange.is_stalled else outcome,
            duration_ms=round(duration_s * 1000, 3),
            **exchange.notes,
        )


def _check_method(exchange: Exchange, *allowed: str) -> None:
    if exchange.method not in allowed:
        exchange.add_header(b"allow", ", ".join(allowed))
        text = f"{exchange.path} is for {' and '.join(allowed)}, not {exchange.method}"
        raise ApiError(405, text, code="method_not_allowed")


def _check_content_type(exchange: Exchange) -> None:
    """JSON, or nothing said: a form or a plain text is somebody's mistake."""
    kind = exchange.header(b"content-type").partition(b";")[0].strip().lower()
    if kind and kind != b"application/json" and not kind.endswith(b"+json"):
        text = "the body must be JSON, sent with Content-Type: application/json"
        raise ApiError(415, text, code="bad_content_type")


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        else:
            await send({"type": "lifespan.shutdown.complete"})
            return
