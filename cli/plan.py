"""`tidegate plan`: what a model's pools would hold, without loading its weights."""

import argparse
import sys

import msgspec

from tidegate.cli import values
from tidegate.cli.options import Subparsers, add_command, add_model_name
from tidegate.cli.parser import fail
from tidegate.cli.planned import add_planned, outputs_of, planned_workers

DESCRIPTION = """\
Tells what `tidegate serve` would do with the same options: its pools, the longest prompt, and
how many requests run at once; and beside it the same memory in a server that caps prompts by
its window pool, and in one that keeps a full cache for every layer.
Reads the model's configuration only: a folder with config.json alone will do.

examples:
  tidegate plan --kv-memory 1GiB
  tidegate plan model.gguf --kv-memory 8GiB --lengths 1000+200,30000+500
  tidegate plan --full-pool-tokens 65536 --window-pool-tokens 8192 --json
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "plan", run, "tell what fits, before serving", DESCRIPTION)
    add_model_name(parser)
    questions = add_planned(parser, "needed unless --full-pool-tokens is given")
    questions.add_argument(
        "--lengths",
        type=values.lengths,
        metavar="L+M,L+M",
        help="requests to count, as tokens of the prompt + new tokens "
        "(default: a few that the model's context allows)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from tidegate.cli.plan_text import render
    from tidegate.cli.planning import Size, default_sizes, make_plan
    from tidegate.cli.pool_checks import check_model
    from tidegate.engine.checkpoint.errors import CheckpointError
    from tidegate.engine.checkpoint.registry import open_checkpoint
    from tidegate.engine.settings import SettingError
    from tidegate.kvcache.layout import LayoutError
    from tidegate.kvcache.sizer import SizeError

    try:
        workers = planned_workers(arguments)
        config = open_checkpoint(arguments.model, needs_weights=False).config
        check_model(arguments, config)
        sizes = (
            default_sizes(config.context)
            if arguments.lengths is None
            else tuple(Size(*pair) for pair in arguments.lengths)
        )
        plan = make_plan(config, workers, outputs_of(arguments), sizes)
    except (CheckpointError, LayoutError, SettingError, SizeError) as error:
        fail(arguments.parser.prog, str(error))
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(plan)).decode() + "\n")
    else:
        sys.stdout.write(render(plan))
    return 0
