"""Runs the HTTP proxy.

1. It connects to the scheduler and listens; until a worker has joined, requests get 503.
2. It serves until it is told to stop, or the scheduler is lost.
3. Told to stop, it takes no more connections, gives running requests `stop_grace_ms`, and ends
   the rest with an error. If the scheduler is lost, they have got their error already.
4. What is still being sent has `LAST_SENDS_MS` to leave; then connections are cut.
"""

import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import anycorn
import trio
from anycorn.typing import ASGIFramework

from tidegate.clients.async_client import AsyncClient
from tidegate.clients.errors import ConnectFailed
from tidegate.clients.proxy.app import App
from tidegate.clients.proxy.backend import Backend
from tidegate.clients.proxy.cut import cut_connections
from tidegate.clients.proxy.server_log import server_logger
from tidegate.clients.proxy.settings import ProxySettings
from tidegate.ipc.lifeline import LIFELINE_STATUS, watch_lifeline
from tidegate.ipc.log import Log, configure
from tidegate.ipc.log_events import LogEvent

LAST_SENDS_MS = 500
LIFELINE_MS_MAX = 2_500  # From the parent's end to this process's end, come what may.
BACKLOG_COUNT = 2048  # Connections that the system keeps until they are accepted.
# Longer than httpx, and with it OpenAI's package, keeps an idle connection (5 s): the client
# lets go first. But short, since the server keeps one that its client has closed as long.
KEEP_ALIVE_S = 7.0
DESCRIPTOR_COUNT_MAX = 65_536
STATUS_OK = 0
STATUS_LOST = 1
STATUS_NOT_STARTED = 2


class Stop:
    """Why the proxy is to end, once somebody says so.

    `starting` is cancelled if that happens before the proxy serves.
    """

    def __init__(self, starting: trio.CancelScope | None = None) -> None:
        self.event = trio.Event()
        self.status = STATUS_OK
        self._starting = starting

    def set(self, status: int) -> None:
        """The first call counts."""
        if not self.event.is_set():
            self.status = status
            self.event.set()
            if self._starting is not None:
                self._starting.cancel()

    def note_serving(self) -> None:
        """From now on the proxy sees to its end by itself."""
        self._starting = None


def run_proxy(settings: ProxySettings) -> int:
    """Serve until SIGTERM, SIGINT, or the end of the parent or of the scheduler.

    Returns the process's exit status: 0 after a signal, 1 when the scheduler or the parent was
    lost, 2 if it could not start, which is told on standard error.
    """
    path = None if settings.log is None else str(settings.log)
    log = configure("proxy", path, settings.log_level)
    log.info(LogEvent.PROCESS_STARTED, endpoint=settings.endpoint)
    raise_descriptor_limit()
    try:
        status = trio.run(partial(_main, settings, log))
    except (ConnectFailed, OSError) as error:
        log.error(LogEvent.PROCESS_STOPPED, status=STATUS_NOT_STARTED, reason=str(error))
        print(f"tidegate proxy: {error}", file=sys.stderr, flush=True)
        return STATUS_NOT_STARTED
    log.info(LogEvent.PROCESS_STOPPED, status=status)
    log.report_suppressed()
    return status


def raise_descriptor_limit() -> None:
    """Let this process have as many connections as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTOR_COUNT_MAX
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _main(settings: ProxySettings, log: Log) -> int:
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        stop = Stop(nursery.cancel_scope)
        if settings.lifeline_fd is not None:
            token = trio.lowlevel.current_trio_token()
            watch_lifeline(settings.lifeline_fd, partial(_parent_ended, token, stop))
        nursery.start_soon(_stop_at_signals, stop)
        try:
            await serve_proxy(settings, log, stop)
        except (ConnectFailed, OSError) as error:
            failure = error  # Out of the nursery it would come as an exception group.
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return stop.status


async def _stop_at_signals(stop: Stop) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async for _ in received:
            stop.set(STATUS_OK)


def _parent_ended(token: trio.lowlevel.TrioToken, stop: Stop) -> None:
    """Called in a thread of its own. Streams get their error, if that is quick."""
    try:
        token.run_sync_soon(stop.set, STATUS_LOST)
        time.sleep(LIFELINE_MS_MAX / 1000)
    finally:
        os._exit(LIFELINE_STATUS)


async def serve_proxy(
    settings: ProxySettings,
    log: Log,
    stop: Stop,
    on_listening: Callable[[int], None] | None = None,
) -> int:
    """Serve until `stop`, or until the scheduler is lost; the exit status.

    `on_listening` is told the port. Raises `ConnectFailed`, and `OSError` if it cannot listen.
    """
    listener = _open_listener(settings)
    try:
        async with AsyncClient(
            settings.endpoint, connect_ms_max=settings.connect_ms_max
        ) as client:
            backend = Backend(client, settings.chat_template)
            app = App(backend, settings, log)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_when_lost, client, stop)
                nursery.start_soon(backend.load)
                no_more = trio.Event()
                port: int = listener.getsockname()[1]
                await nursery.start(_serve_http, app, listener, no_more, log)
                stop.note_serving()
                log.info(LogEvent.PROCESS_READY, port=port)
                if on_listening is not None:
                    on_listening(port)
                await stop.event.wait()
                log.info(LogEvent.PROCESS_STOPPING, status=stop.status)
                backend.refuse_new()
                no_more.set()
                if stop.status == STATUS_OK:
                    with trio.move_on_after(settings.stop_grace_ms / 1000):
                        await app.wait_idle()
                backend.end_all()
                with trio.move_on_after(LAST_SENDS_MS / 1000):
                    await app.wait_idle()
                cut_connections(port)
                nursery.cancel_scope.cancel()
    finally:
        listener.close()
    return stop.status


def _open_listener(settings: ProxySettings) -> socket.socket:
    if settings.listen_fd is not None:
        listener = socket.socket(fileno=settings.listen_fd)
    else:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family)
    # Connections inherit it: an event must not wait for the one before it to be acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def _stop_when_lost(client: AsyncClient, stop: Stop) -> None:
    await client.wait_lost()
    stop.set(STATUS_LOST)


async def _serve_http(
    app: App,
    listener: socket.socket,
    no_more: trio.Event,
    log: Log,
    task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
) -> None:
    config = anycorn.Config()
    # The server closes the descriptor, and from then on nobody listens.
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG_COUNT
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.graceful_timeout = math.inf  # `serve_proxy` sees to the end.
    config.errorlog = server_logger(log)
    config.include_server_header = False
    # Of the function's types, those for WSGI are incomplete.
    await anycorn.serve(  # pyright: ignore[reportUnknownMemberType]
        cast("ASGIFramework", app),
        config,
        shutdown_trigger=no_more.wait,
        task_status=task_status,
        mode="asgi",
    )
