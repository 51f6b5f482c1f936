"""`tidegate scheduler`: one scheduler, for workers and clients that dial it."""

import argparse

from tidegate.cli.options import (
    Subparsers,
    add_chunk,
    add_command,
    add_fence,
    add_lifeline,
    add_log,
    add_scheduling,
)
from tidegate.cli.parser import fail, leave
from tidegate.cli.paths import default_worker_endpoint
from tidegate.cli.queue_options import add_queue

DESCRIPTION = """\
Starts one scheduler. Workers and clients dial its two endpoints, in any order and at any time.
`tidegate serve` starts it together with all the others.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "scheduler", run, "start a scheduler alone", DESCRIPTION)
    for option, whom in (("--client-endpoint", "clients"), ("--worker-endpoint", "workers")):
        parser.add_argument(
            option,
            metavar="ENDPOINT",
            help=f"where {whom} dial: ipc://PATH or tcp://HOST:PORT "
            "(default: a socket in this user's private folder)",
        )
    add_chunk(parser)
    add_scheduling(parser)
    add_queue(parser)
    add_log(parser)
    add_lifeline(parser)
    add_fence(parser)


def run(arguments: argparse.Namespace) -> int:
    from tidegate.cli.settings import scheduler_settings
    from tidegate.clients.endpoint_default import default_endpoint
    from tidegate.engine.settings import SettingError
    from tidegate.ipc.endpoints import EndpointError
    from tidegate.ipc.log import LogError
    from tidegate.scheduler.process import run_scheduler

    try:
        settings = scheduler_settings(
            arguments,
            client_endpoint=arguments.client_endpoint or default_endpoint(),
            worker_endpoint=arguments.worker_endpoint or default_worker_endpoint(),
        )
        leave(run_scheduler(settings))
    except (EndpointError, LogError, SettingError) as error:
        fail(arguments.parser.prog, str(error))
