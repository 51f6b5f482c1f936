"""The scheduler's process: endpoints, links, the core and its shell, until it is to stop."""

import os
import random
import secrets
import signal
from pathlib import Path

import msgspec
import trio

from tidegate.ipc.fence_pipe import ask_to_kill
from tidegate.ipc.lifeline import LIFELINE_STATUS, watch_lifeline
from tidegate.ipc.link import ServerLink
from tidegate.ipc.log import Log, configure
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.log_line import DEFAULT_LEVEL
from tidegate.ipc.protocol import WorkerId
from tidegate.ipc.zmq_context import Context, open_context
from tidegate.scheduler.core import Core
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.shell import Shell, ShellSettings

PROCESS_NAME = "scheduler"
EPOCH_BYTES = 4
CACHE_SECRET_BYTES = 32
# Time for the last messages to clients, when the scheduler stops.
FLUSH_S_MAX = 0.3
LINGER_MS = 200


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `run_scheduler` needs.

    `lifeline_fd` is the read end of a pipe whose end of file means that the parent is gone;
    into `fence_fd` go the numbers of worker processes that the parent is to kill.
    """

    client_endpoint: str
    worker_endpoint: str
    core: CoreSettings = CoreSettings()
    shell: ShellSettings = ShellSettings()
    log: Path | None = None
    log_level: str = DEFAULT_LEVEL
    lifeline_fd: int | None = None
    fence_fd: int | None = None


def run_scheduler(settings: SchedulerSettings) -> int:
    """Serve until SIGTERM, SIGINT or the end of the lifeline; returns the exit status.

    Raises `EndpointError` if an endpoint cannot be had, and `LogError` for the log file.
    """
    path = None if settings.log is None else str(settings.log)
    log = configure(PROCESS_NAME, path, settings.log_level)
    log.info(LogEvent.PROCESS_STARTED)
    with open_context() as context:
        return trio.run(_serve, settings, context, log)


async def _serve(settings: SchedulerSettings, context: Context, log: Log) -> int:
    epoch = secrets.token_hex(EPOCH_BYTES)

    def malformed(link: str) -> None:
        log.rate_limited(LogEvent.MALFORMED_FRAME, link=link)

    def fence(worker: WorkerId, pid: int) -> None:
        log.warning(LogEvent.PROCESS_TO_KILL, worker=worker, worker_pid=pid)
        if settings.fence_fd is not None:
            ask_to_kill(settings.fence_fd, pid)

    async with (
        ServerLink(
            context,
            settings.worker_endpoint,
            on_malformed=lambda _, what: malformed(f"workers: {what}"),
        ) as workers,
        ServerLink(
            context,
            settings.client_endpoint,
            on_malformed=lambda _, what: malformed(f"clients: {what}"),
        ) as clients,
    ):
        shell = Shell(
            Core(settings.core),
            workers,
            clients,
            log,
            settings.shell,
            epoch,
            random.Random(secrets.randbits(64)),
            secrets.token_bytes(CACHE_SECRET_BYTES),
            fence,
        )
        log.info(
            LogEvent.PROCESS_READY,
            epoch=epoch,
            client_endpoint=clients.address,
            worker_endpoint=workers.address,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.run)
            nursery.start_soon(clients.run)
            nursery.start_soon(shell.run)
            status, reason = await _wait_for_end(settings.lifeline_fd)
            nursery.cancel_scope.cancel()
        log.info(LogEvent.PROCESS_STOPPING, reason=reason)
        shell.end_streams(f"the server is stopping: {reason}")
        with trio.CancelScope(shield=True):
            await clients.flush(FLUSH_S_MAX)
        clients.close(LINGER_MS)
    log.report_suppressed()
    log.info(LogEvent.PROCESS_STOPPED, status=status)
    return status


async def _wait_for_end(lifeline_fd: int | None) -> tuple[int, str]:
    """Wait for a signal, or for the parent to be gone; returns the exit status and why."""
    parent_gone = trio.Event()
    if lifeline_fd is not None:
        token = trio.lowlevel.current_trio_token()
        watch_lifeline(lifeline_fd, lambda: token.run_sync_soon(parent_gone.set))
    endings: list[tuple[int, str]] = []
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def watch_signals() -> None:
                async for number in signals:
                    endings.append((os.EX_OK, signal.Signals(number).name))
                    nursery.cancel_scope.cancel()

            async def watch_parent() -> None:
                await parent_gone.wait()
                endings.append((LIFELINE_STATUS, "its parent is gone"))
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch_signals)
            nursery.start_soon(watch_parent)
    return endings[0]
