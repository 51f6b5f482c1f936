"""`tidegate logs`: what a log tells of one request, and of all of them."""

import argparse
import sys

import msgspec

from tidegate.cli import values
from tidegate.cli.options import Subparsers, add_command
from tidegate.cli.parser import Parser, fail
from tidegate.cli.paths import default_log_file

DESCRIPTION = """\
Reads the log that all processes of a server write to: JSON, one event a line.
docs/LOGS.md describes the events and their fields.
"""


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "logs", help="read a log: one request's story, or a summary", description=DESCRIPTION
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
        help="the request's id in the log, or the id of the HTTP answer, or a beginning of "
        "either that no other request has",
    )
    _add_file(story)
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


def run_summary(arguments: argparse.Namespace) -> int:
    from tidegate.clients.logs.lines import LogFileError
    from tidegate.clients.logs.summary import render, summarise

    try:
        summary = summarise(arguments.file)
    except LogFileError as error:
        fail(arguments.parser.prog, str(error), status=1)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(summary)).decode() + "\n")
    else:
        sys.stdout.write(render(summary) + "\n")
    return 0
