"""`tidegate plan`: what a model's pools would hold, without loading its weights."""

import argparse
import sys

import msgspec

from tidegate.cli import values
from tidegate.cli.options import (
    DEFAULT_MAX_TOKENS,
    Subparsers,
    add_chunk,
    add_command,
    add_dtype,
    add_max_running,
    add_model_name,
    add_pools,
)
from tidegate.cli.parser import fail

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
    add_pools(
        parser.add_argument_group("pools, of each worker"),
        "needed unless --full-pool-tokens is given",
    )
    engine = parser.add_argument_group("engine")
    add_dtype(engine)
    add_max_running(engine)
    add_chunk(engine)
    engine.add_argument(
        "--role-both",
        action="store_true",
        help="one worker that does prefill and decode, without a hand-off",
    )
    questions = parser.add_argument_group("what is asked")
    questions.add_argument(
        "--max-tokens",
        type=values.count,
        metavar="N",
        default=DEFAULT_MAX_TOKENS,
        help="new tokens that the longest prompt leaves room for, beside 1 "
        f"(default {DEFAULT_MAX_TOKENS})",
    )
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
    from tidegate.cli.pool_checks import check_model, check_pool_tokens
    from tidegate.engine.checkpoint.errors import CheckpointError
    from tidegate.engine.checkpoint.registry import open_checkpoint
    from tidegate.engine.settings import SettingError, WorkerSettings
    from tidegate.ipc.protocol import Role, WorkerId
    from tidegate.kvcache.layout import LayoutError
    from tidegate.kvcache.sizer import SizeError

    def settings(role: Role) -> WorkerSettings:
        return WorkerSettings(
            model=arguments.model,
            role=role,
            name=WorkerId(role.value),
            endpoint="",
            dtype=arguments.dtype,
            page_tokens=arguments.page_tokens,
            kv_memory=arguments.kv_memory,
            full_pool_tokens=arguments.full_pool_tokens,
            window_pool_tokens=arguments.window_pool_tokens,
            max_running=arguments.max_running,
            chunk_tokens=arguments.chunk_tokens,
            swa_only_transfer=arguments.swa_only_transfer,
        )

    roles = (Role.BOTH,) if arguments.role_both else (Role.PREFILL, Role.DECODE)
    workers = [settings(role) for role in roles]
    try:
        for worker in workers:
            worker.check()
        page_tokens: int = arguments.page_tokens
        check_pool_tokens("--full-pool-tokens", arguments.full_pool_tokens, page_tokens)
        check_pool_tokens("--window-pool-tokens", arguments.window_pool_tokens, page_tokens)
        config = open_checkpoint(arguments.model, needs_weights=False).config
        check_model(arguments, config)
        sizes = (
            default_sizes(config.context)
            if arguments.lengths is None
            else tuple(Size(*pair) for pair in arguments.lengths)
        )
        max_tokens = tuple(dict.fromkeys((1, arguments.max_tokens)))
        plan = make_plan(config, workers, max_tokens, sizes)
    except (CheckpointError, LayoutError, SettingError, SizeError) as error:
        fail(arguments.parser.prog, str(error))
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(plan)).decode() + "\n")
    else:
        sys.stdout.write(render(plan))
    return 0
