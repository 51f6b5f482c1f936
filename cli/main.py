"""The `tidegate` command. Each command's own modules are loaded when it runs."""

import os
import sys
from collections.abc import Sequence

from tidegate import __version__
from tidegate.cli import inspect_model, logs, models, plan, proxy, scheduler, serve, worker
from tidegate.cli.parser import USAGE_STATUS, Parser

DESCRIPTION = """\
Serves large language models with prefill and decode on separate workers, and admits requests
of hybrid sliding-window models against their full KV pool.

Three ways to use it:
  tidegate serve                     start a server on this machine, and print a curl line
  tidegate logs story REQUEST        see what happened to a request
  from tidegate import Client        use a running server from Python, without HTTP
"""
EPILOG = "`tidegate COMMAND --help` tells all options of a command."

INTERRUPTED_STATUS = 130
PIPE_CLOSED_STATUS = 141


def build_parser() -> Parser:
    parser = Parser(prog="tidegate", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"tidegate {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (serve, logs, models, inspect_model, plan, scheduler, worker, proxy):
        command.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name, and exit with its status."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if not hasattr(parsed, "run"):
        parser.print_help(sys.stderr)
        sys.exit(USAGE_STATUS)
    try:
        status = parsed.run(parsed)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    except BrokenPipeError:
        # Whoever read the output has enough, as in `tidegate logs summary | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = PIPE_CLOSED_STATUS
    sys.exit(status)
