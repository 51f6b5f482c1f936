"""`tidegate proxy`: one HTTP proxy with OpenAI's API, which dials a scheduler."""

import argparse

from tidegate.cli import values
from tidegate.cli.options import Subparsers, add_command, add_http, add_lifeline, add_log
from tidegate.cli.parser import fail, leave

DESCRIPTION = """\
Starts one HTTP proxy, which needs no model: it learns all from the scheduler at --endpoint.
Any number of them may serve one scheduler. `tidegate serve` starts one together with all the
others.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "proxy", run, "start an HTTP proxy alone", DESCRIPTION)
    parser.add_argument(
        "--endpoint",
        metavar="ENDPOINT",
        help="the scheduler's endpoint for clients (default: the one in TIDEGATE_ENDPOINT, "
        "else the one that `tidegate scheduler` has by default)",
    )
    add_http(parser)
    add_log(parser)
    add_lifeline(parser)
    parser.add_argument("--listen-fd", type=values.descriptor, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    from tidegate.cli.http_listener import open_listener
    from tidegate.cli.settings import proxy_settings
    from tidegate.clients.proxy.server import run_proxy
    from tidegate.engine.settings import SettingError
    from tidegate.ipc.endpoints import EndpointError
    from tidegate.ipc.log import LogError

    try:
        listen_fd: int | None = arguments.listen_fd
        if listen_fd is None:
            listen_fd = open_listener(arguments.host, arguments.port).detach()
        settings = proxy_settings(arguments, endpoint=arguments.endpoint, listen_fd=listen_fd)
        leave(run_proxy(settings))
    except (EndpointError, LogError, SettingError) as error:
        fail(arguments.parser.prog, str(error))
