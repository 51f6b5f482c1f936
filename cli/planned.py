"""The options that describe a server which is only planned, and the workers they stand for."""

import argparse
from typing import TYPE_CHECKING

from tidegate.cli import values
from tidegate.cli.options import (
    DEFAULT_MAX_TOKENS,
    Target,
    add_chunk,
    add_dtype,
    add_max_running,
    add_pools,
)
from tidegate.cli.parser import Parser

if TYPE_CHECKING:
    from tidegate.engine.settings import WorkerSettings


def add_planned(parser: Parser, kv_memory_default: str) -> Target:
    """The options of `planned_workers` and `outputs_of`. Returns the group of what is asked."""
    add_pools(parser.add_argument_group("pools, of each worker"), kv_memory_default)
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
    return questions


def planned_workers(arguments: argparse.Namespace) -> "list[WorkerSettings]":
    """One worker of each role. Raises `SettingError` for options that cannot be."""
    from tidegate.cli.pool_checks import check_pool_tokens
    from tidegate.engine.settings import WorkerSettings
    from tidegate.ipc.protocol import Role, WorkerId

    roles = (Role.BOTH,) if arguments.role_both else (Role.PREFILL, Role.DECODE)
    workers = [
        WorkerSettings(
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
        for role in roles
    ]
    for worker in workers:
        worker.check()
    page_tokens: int = arguments.page_tokens
    check_pool_tokens("--full-pool-tokens", arguments.full_pool_tokens, page_tokens)
    check_pool_tokens("--window-pool-tokens", arguments.window_pool_tokens, page_tokens)
    return workers


def outputs_of(arguments: argparse.Namespace) -> tuple[int, ...]:
    """The counts of new tokens for which the longest prompt is asked."""
    return tuple(dict.fromkeys((1, arguments.max_tokens)))
