"""`tidegate worker`: one engine worker, which dials a scheduler."""

import argparse
import os

from tidegate.cli import values
from tidegate.cli.options import (
    Subparsers,
    add_chunk,
    add_command,
    add_engine,
    add_lifeline,
    add_log,
    add_model,
)
from tidegate.cli.parser import fail
from tidegate.cli.paths import default_worker_endpoint
from tidegate.ipc.protocol import Role

DESCRIPTION = """\
Starts one worker, which loads MODEL and joins the scheduler at --endpoint. All workers of a
scheduler serve the same model, with the same --dtype, --page-tokens and --swa-only-transfer.
`tidegate serve` starts a prefill and a decode worker together with all the others.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "worker", run, "start a worker alone", DESCRIPTION)
    add_model(parser)
    parser.add_argument(
        "--role",
        type=Role,
        choices=tuple(Role),
        metavar="|".join(role.value for role in Role),
        required=True,
        help="what is placed on it: prompts, the tokens after them, or both",
    )
    parser.add_argument(
        "--name",
        type=values.process_name,
        help="its name in logs and refusals (default: its role and process number)",
    )
    parser.add_argument(
        "--endpoint",
        metavar="ENDPOINT",
        help="the scheduler's endpoint for workers "
        "(default: the one that `tidegate scheduler` has by default)",
    )
    add_engine(parser)
    add_chunk(parser)
    add_log(parser)
    add_lifeline(parser)


def run(arguments: argparse.Namespace) -> int:
    from tidegate.cli.settings import worker_settings
    from tidegate.engine.settings import SettingError
    from tidegate.engine.worker import run_worker_process
    from tidegate.ipc.endpoints import EndpointError

    try:
        settings = worker_settings(
            arguments,
            role=arguments.role,
            name=arguments.name or f"{arguments.role.value}-{os.getpid()}",
            endpoint=arguments.endpoint or default_worker_endpoint(),
            worker_count=1,
        )
    except (EndpointError, SettingError) as error:
        fail(arguments.parser.prog, str(error))
    run_worker_process(settings)
