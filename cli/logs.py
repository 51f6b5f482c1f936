"""`tidegate logs`: what a log tells of one request, and of all of them."""

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tidegate.cli import values
from tidegate.cli.options import Subparsers, add_command
from tidegate.cli.parser import Parser, fail
from tidegate.cli.paths import default_log_file

Found = TypeVar("Found")

DESCRIPTION = """\
Reads the log that all processes of a server write to: JSON, one event a line.
docs/LOGS.md describes the events and their fields.
"""
WHY_DESCRIPTION = """\
Prints what one request waited for, from when and how long: its turn in the queue, a row, or
pages of a pool, with how many it lacked and which requests held most of them; what let it go on
(`>`); and how it ended, or that it waits still.

For example, first of the request itself, and then of the one that was in its way:
  tidegate logs why 87c11e09-7
  tidegate logs why 87c11e09-4

A program can ask what a running request waits for: `why_waiting` of the client library.
"""
REQUEST_HELP = (
    "the request's id in the log, or the id of the HTTP answer, or a beginning of either that "
    "no other request has"
)


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "logs",
        help="read a log: one request's story or waits, or a summary",
        description=DESCRIPTION,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    story = add_command(
        commands,
        "story",
        run_story,
        "everything about one request, in order",
        "Prints what happened to one request, when, and how long each phase took.",
    )
    story.add_argument(
        "request",
        metavar="REQUEST",
        help=REQUEST_HELP,
    )
    _add_file(story)
    why = add_command(
        commands,
        "why",
        run_why,
        "what one request waited for, and who held it",
        WHY_DESCRIPTION,
    )
    why.add_argument("request", metavar="REQUEST", help=REQUEST_HELP)
    _add_file(why)
    why.add_argument("--json", action="store_true", help="print JSON")
    summary = add_command(
        commands,
        "summary",
        run_summary,
        "all requests: reasons, times, refusals, bytes",
        "Prints what became of all requests: counts, times, refusals, and bytes moved.",
    )
    _add_file(summary)
    summary.add_argument("--json", action="store_true", help="print JSON")


def _add_file(parser: Parser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        type=values.path,
        default=default_log_file(),
        help=f"the log (default {default_log_file()})",
    )


def run_story(arguments: argparse.Namespace) -> int:
    from tidegate.clients.logs.lines import LogFileError
    from tidegate.clients.logs.story import NoSuchRequest, tell
    from tidegate.clients.logs.story_text import render_story

    try:
        story = tell(arguments.file, arguments.request)
    except (LogFileError, NoSuchRequest) as error:
        fail(arguments.parser.prog, str(error), status=1)
    sys.stdout.write(render_story(story) + "\n")
    return 0


def run_why(arguments: argparse.Namespace) -> int:
    from tidegate.clients.logs.lines import LogFileError
    from tidegate.clients.logs.story import NoSuchRequest
    from tidegate.clients.logs.why import find_why
    from tidegate.clients.logs.why_text import render_why

    try:
        why = find_why(arguments.file, arguments.request)
    except (LogFileError, NoSuchRequest) as error:
        fail(arguments.parser.prog, str(error), status=1)
    _print(why, render_why, as_json=arguments.json)
    return 0


def run_summary(arguments: argparse.Namespace) -> int:
    from tidegate.clients.logs.lines import LogFileError
    from tidegate.clients.logs.summary import render, summarise

    try:
        summary = summarise(arguments.file)
    except LogFileError as error:
        fail(arguments.parser.prog, str(error), status=1)
    _print(summary, render, as_json=arguments.json)
    return 0


def _print(found: Found, render: Callable[[Found], str], *, as_json: bool) -> None:
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(found)).decode()
    else:
        text = render(found)
    sys.stdout.write(text + "\n")
