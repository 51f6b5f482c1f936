"""The processes of one server on this machine: what each is told, and how they are run.

1. Everything is checked, and what only one may have (the folder, the HTTP port) is taken.
   Until then nothing has been started, and what is wrong is told in one line.
2. The processes are started; workers say on standard error how far they have come.
3. When a token can flow, the address, the pools and a line to paste are printed.
4. They run until one ends or a signal comes; then all end.
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import trio

from tidegate.cli.child_commands import proxy_command, scheduler_command, worker_command
from tidegate.cli.children import ChildSpec, StopStage
from tidegate.cli.fencing import Fencing
from tidegate.cli.http_listener import open_listener, url_of
from tidegate.cli.paths import WORKER_SOCKET
from tidegate.cli.pool_checks import check_model
from tidegate.cli.queue_options import tenant_weights
from tidegate.cli.readiness import wait_ready
from tidegate.cli.ready import Served, ready_text
from tidegate.cli.run_folder import open_run_folder
from tidegate.cli.settings import (
    check_chat_template,
    log_file,
    proxy_settings,
    scheduler_settings,
    worker_settings,
)
from tidegate.cli.supervisor import supervise
from tidegate.clients.endpoint_default import CLIENT_SOCKET
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.log import Log, configure
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.log_line import LogValue
from tidegate.ipc.protocol import Role

# Two workers whose threads spin at barriers would starve each other.
CHILD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}


def run_server(arguments: argparse.Namespace) -> int:
    """Run a server as the options say; returns the exit status.

    Raises `SettingError`, `CheckpointError` and `LogError` before anything is started.
    """
    log = configure("supervisor", str(log_file(arguments.log)), arguments.log_level)
    log.info(LogEvent.SETTING, **_option_values(arguments))
    with open_run_folder(arguments.run_dir) as folder:
        client_endpoint = folder.endpoint(CLIENT_SOCKET)
        worker_endpoint = folder.endpoint(WORKER_SOCKET)
        workers = _workers(arguments, worker_endpoint)
        checkpoint = open_checkpoint(arguments.model, arguments.chat_template)
        check_model(arguments, checkpoint.config)
        check_chat_template(arguments.chat_template)
        scheduler = scheduler_settings(
            arguments, client_endpoint=client_endpoint, worker_endpoint=worker_endpoint
        )
        with open_listener(arguments.host, arguments.port) as listener:
            proxy = proxy_settings(
                arguments, endpoint=client_endpoint, listen_fd=listener.fileno()
            )
            served = Served(
                url=url_of(listener),
                model=checkpoint.config.name,
                has_chat_template=checkpoint.chat_template is not None,
                device=arguments.device,
                dtype=arguments.dtype,
                log=log_file(arguments.log),
                client_endpoint=client_endpoint,
            )
            kept = (folder.lock,)  # Held as long as any of them lives.
            fence_read, fence_write = os.pipe()
            scheduler = msgspec.structs.replace(scheduler, fence_fd=fence_write)
            specs = [
                _spec(
                    "scheduler",
                    StopStage.LAST,
                    scheduler_command(scheduler),
                    (*kept, fence_write),
                ),
                *(
                    _spec(
                        f"{each.role.value} worker",
                        StopStage.MIDDLE,
                        worker_command(each),
                        kept,
                    )
                    for each in workers
                ),
                _spec(
                    "proxy",
                    StopStage.FRONT,
                    proxy_command(proxy),
                    (*kept, listener.fileno()),
                ),
            ]
            return _run(specs, served, listener, log, fence_read)


def _option_values(arguments: argparse.Namespace) -> dict[str, LogValue]:
    """Every option as it was given, or its default."""
    weights = tenant_weights(arguments).items()
    values: dict[str, LogValue] = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if value is None or isinstance(value, str | int | float | Path)
    }
    values["tenant_weight"] = (
        ", ".join(f"{name}={weight:g}" for name, weight in weights) or None
    )
    return values


def _workers(arguments: argparse.Namespace, endpoint: str) -> list[WorkerSettings]:
    roles = (Role.BOTH,) if arguments.role_both else (Role.PREFILL, Role.DECODE)
    return [
        worker_settings(
            arguments,
            role=role,
            name=f"{role.value}-0",
            endpoint=endpoint,
            worker_count=len(roles),
        )
        for role in roles
    ]


def _spec(
    name: str, stage: StopStage, command: tuple[str, ...], descriptors: tuple[int, ...]
) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=command,
        environment=CHILD_ENVIRONMENT,
        descriptors=descriptors,
        stage=stage,
    )


def _run(
    specs: Sequence[ChildSpec],
    served: Served,
    listener: socket.socket,
    log: Log,
    fence_fd: int,
) -> int:
    host, port = listener.getsockname()[:2]

    def say(text: str) -> None:
        log.info(LogEvent.PROCESS_STOPPING, reason=text)
        _say(text)

    def restarted(spec: ChildSpec) -> None:
        log.warning(LogEvent.PROCESS_RESTARTED, worker=spec.name)
        _say(f"the {spec.name} made no progress: it was killed, and is started again")

    async def announce() -> None:
        # The proxy has its own copy now: when it is gone, nobody listens.
        listener.close()
        status = await wait_ready(served.client_endpoint, host, port)
        log.info(LogEvent.PROCESS_READY, url=served.url, model=served.model)
        print(ready_text(served, status), flush=True)

    log.info(LogEvent.PROCESS_STARTED, model=served.model, url=served.url)
    _say(f"starting {', '.join(spec.name for spec in specs)} for {served.model}")
    status = trio.run(partial(supervise, specs, announce, say, Fencing(fence_fd, restarted)))
    log.info(LogEvent.PROCESS_STOPPED, status=status)
    return status


def _say(text: str) -> None:
    print(f"tidegate: {text}", file=sys.stderr, flush=True)
