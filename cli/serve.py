"""`tidegate serve`: a whole server on this machine, in one command."""

import argparse

from tidegate.cli import values
from tidegate.cli.options import (
    Subparsers,
    add_chunk,
    add_command,
    add_engine,
    add_http,
    add_log,
    add_model,
    add_scheduling,
)
from tidegate.cli.parser import fail
from tidegate.cli.queue_options import add_queue

DESCRIPTION = """\
Starts a scheduler, a prefill worker, a decode worker and an HTTP proxy with OpenAI's API, and
prints the address and a curl line when they are ready. They end together: by Ctrl-C, or when
one of them fails.

examples:
  tidegate serve                              Gemma 3 270M, a base model, for completions
  tidegate serve smollm2-135m                 a model with a chat template
  tidegate serve model.gguf --port 9000       a file
  tidegate serve --kv-memory 4GiB             longer prompts, more of them at once
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "serve", run, "start a whole server", DESCRIPTION)
    add_model(parser)
    add_http(parser)
    add_engine(parser)
    scheduling = parser.add_argument_group("scheduling")
    add_chunk(scheduling)
    add_scheduling(scheduling)
    add_queue(parser.add_argument_group("queue and tenants"))
    processes = parser.add_argument_group("processes")
    processes.add_argument(
        "--role-both",
        action="store_true",
        help="one worker that does prefill and decode, without a hand-off",
    )
    processes.add_argument(
        "--run-dir",
        type=values.path,
        metavar="DIR",
        help="private folder for the sockets (default: a fresh one, so that several servers "
        "can run)",
    )
    add_log(processes)


def run(arguments: argparse.Namespace) -> int:
    from tidegate.cli.server import run_server
    from tidegate.engine.checkpoint.errors import CheckpointError
    from tidegate.engine.settings import SettingError
    from tidegate.ipc.log import LogError

    try:
        return run_server(arguments)
    except (CheckpointError, LogError, SettingError) as error:
        fail(arguments.parser.prog, str(error))
