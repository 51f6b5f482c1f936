"""`tidegate inspect`: a checkpoint's KV layout and its flag, and what a given memory holds."""

import argparse
import sys

import msgspec

from tidegate.cli.options import Subparsers, add_command
from tidegate.cli.parser import fail
from tidegate.cli.planned import add_planned, outputs_of, planned_workers

DESCRIPTION = """\
Tells how a model's keys and values would be kept, from its configuration alone: the groups of
layers that share a pool, how far back each reads, the bytes of a token and of a page, the flag
swa_only_transfer with its reason, and what a hand-off moves with the flag and without.
With --kv-memory it also tells the pools and the longest prompt, and which prompts a server
that caps them by its window pool would have refused.

FOLDER is one in Hugging Face's form; config.json is all that is read, and it may be alone.
A .gguf file will do too.

examples:
  tidegate inspect ~/models/MiMo-V2-Flash
  tidegate inspect ~/models/MiMo-V2-Flash --kv-memory 40GiB --page-tokens 64
  tidegate inspect model.gguf --kv-memory 2GiB --swa-only-transfer false
  tidegate inspect config-alone/ --json

To compare servers and to count requests at once: tidegate plan.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers, "inspect", run, "show a checkpoint's KV layout and flag", DESCRIPTION
    )
    parser.add_argument(
        "model",
        metavar="FOLDER",
        help="a folder with config.json, a .gguf file, or a packaged model's name",
    )
    add_planned(parser, "without it only the layout is told")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from tidegate.cli.inspection import inspect
    from tidegate.cli.inspection_text import render
    from tidegate.cli.pool_checks import check_model
    from tidegate.engine.checkpoint.errors import CheckpointError
    from tidegate.engine.checkpoint.registry import open_checkpoint
    from tidegate.engine.settings import SettingError
    from tidegate.kvcache.layout import LayoutError
    from tidegate.kvcache.sizer import SizeError

    try:
        workers = planned_workers(arguments)
        checkpoint = open_checkpoint(arguments.model, needs_weights=False)
        check_model(arguments, checkpoint.config)
        found = inspect(
            checkpoint.config,
            workers,
            outputs_of(arguments),
            has_weights=checkpoint.has_weights,
            notes=checkpoint.notes,
        )
    except (CheckpointError, LayoutError, SettingError, SizeError) as error:
        fail(arguments.parser.prog, str(error))
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        sys.stdout.write(render(found))
    return 0
