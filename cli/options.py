"""The options of the commands, in groups that several commands share.

An option's `dest` is the name of the field that it sets.
"""

import argparse
from collections.abc import Callable
from typing import TypeAlias

from tidegate.cli import values
from tidegate.cli.parser import Parser
from tidegate.ipc.log_line import DEFAULT_LEVEL, LEVELS

DEFAULT_MODEL = "gemma3-270m"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_DEVICE = "cpu"
DEFAULT_DTYPE = "bfloat16"
DEFAULT_PAGE_TOKENS = 16
DEFAULT_CHUNK_TOKENS = 512
DEFAULT_MIXED_CHUNK_TOKENS = 256
DEFAULT_RUNNING_COUNT = 32
DEFAULT_MAX_TOKENS = 1024
DEFAULT_STALL_TIMEOUT_S = 120.0
DEFAULT_FENCE_TIMEOUT_S = 30.0
DEFAULT_QUEUE_TIMEOUT_S = 600.0

# argparse has no public names for these two.
Target: TypeAlias = "Parser | argparse._ArgumentGroup"  # pyright: ignore[reportPrivateUsage]
Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"  # pyright: ignore[reportPrivateUsage]
Run = Callable[[argparse.Namespace], int]


def add_command(
    subparsers: Subparsers, name: str, run: Run, summary: str, description: str
) -> Parser:
    """A subcommand that runs `run(arguments)`, which returns the exit status."""
    parser = subparsers.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_model(parser: Parser) -> None:
    add_model_name(parser)
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        type=values.readable_file,
        help="a Jinja chat template, in place of the model's own",
    )


def add_model_name(parser: Parser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=DEFAULT_MODEL,
        help="gemma3-270m (the default), smollm2-135m, a .gguf file, or a folder in Hugging "
        "Face's form",
    )


def add_engine(parser: Parser) -> None:
    """Options of every worker: where it computes, and its pools."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--device",
        type=values.device,
        default=DEFAULT_DEVICE,
        help=f"cpu, cuda or cuda:N (default {DEFAULT_DEVICE})",
    )
    add_dtype(engine)
    engine.add_argument(
        "--threads",
        type=values.thread_count,
        metavar="N",
        help="threads of each worker on cpu (default: the cores, shared among the workers)",
    )
    add_max_running(engine)
    add_pools(
        parser.add_argument_group("pools, of each worker"),
        "default on cpu: 1GiB, or 10 %% of the memory available if that is less",
    )


def add_dtype(parser: Target) -> None:
    parser.add_argument(
        "--dtype",
        type=values.dtype,
        default=DEFAULT_DTYPE,
        help=f"{' or '.join(values.DTYPES)} (default {DEFAULT_DTYPE})",
    )


def add_max_running(parser: Target) -> None:
    parser.add_argument(
        "--max-running",
        type=values.row_count,
        metavar="N",
        default=DEFAULT_RUNNING_COUNT,
        help=f"requests that a worker runs at once (default {DEFAULT_RUNNING_COUNT})",
    )


def add_pools(pools: Target, kv_memory_default: str) -> None:
    """`kv_memory_default` is what the help says of an absent --kv-memory."""
    pools.add_argument(
        "--kv-memory",
        type=values.byte_size,
        metavar="SIZE",
        help=f"memory for keys and values, such as 2GiB or 512MB ({kv_memory_default})",
    )
    pools.add_argument(
        "--full-pool-tokens",
        type=values.count,
        metavar="N",
        help="size of the full-attention layers' pool (default: by --kv-memory)",
    )
    pools.add_argument(
        "--window-pool-tokens",
        type=values.count,
        metavar="N",
        help="size of the sliding-window layers' pool "
        "(default: what --max-running requests use)",
    )
    pools.add_argument(
        "--page-tokens",
        type=values.page_tokens,
        metavar="N",
        default=DEFAULT_PAGE_TOKENS,
        help=f"tokens in a page (default {DEFAULT_PAGE_TOKENS})",
    )
    pools.add_argument(
        "--swa-only-transfer",
        type=values.true_or_false,
        metavar="true|false",
        help="false keeps and hands over the window layers' keys and values of the whole "
        "prompt; true is accepted only where the model declares it "
        "(default: as the model says)",
    )


def add_chunk(parser: Target) -> None:
    parser.add_argument(
        "--chunk-tokens",
        type=values.count_or_none,
        metavar="N",
        default=DEFAULT_CHUNK_TOKENS,
        help="prompt tokens in one launch at most, or none for no bound "
        f"(default {DEFAULT_CHUNK_TOKENS})",
    )


def add_scheduling(parser: Target) -> None:
    parser.add_argument(
        "--mixed-chunk-tokens",
        type=values.count_or_none,
        metavar="N",
        default=DEFAULT_MIXED_CHUNK_TOKENS,
        help="prompt tokens in one launch at most while rows decode on the same worker, which "
        "wait for it, or none for no bound but --chunk-tokens "
        f"(default {DEFAULT_MIXED_CHUNK_TOKENS})",
    )
    parser.add_argument(
        "--default-max-tokens",
        type=values.count,
        metavar="N",
        default=DEFAULT_MAX_TOKENS,
        help="what an absent max_tokens becomes, if there is room for it "
        f"(default {DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument(
        "--queue-timeout",
        type=values.seconds,
        metavar="SECONDS",
        default=DEFAULT_QUEUE_TIMEOUT_S,
        help="how long a request may wait to begin before it is answered with 503 "
        f"(default {DEFAULT_QUEUE_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--stall-timeout",
        type=values.seconds,
        metavar="SECONDS",
        default=DEFAULT_STALL_TIMEOUT_S,
        help="how long a worker may owe an answer before its requests begin anew elsewhere, or "
        "end; longer than the longest launch takes, so mind it with --chunk-tokens none "
        f"(default {DEFAULT_STALL_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--fence-timeout",
        type=values.seconds,
        metavar="SECONDS",
        default=DEFAULT_FENCE_TIMEOUT_S,
        help="how much longer until such a worker is closed for good; serve then kills its "
        f"process and starts it again (default {DEFAULT_FENCE_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the pages of prompts for others that begin alike, as long as nobody needs "
        "them otherwise (default: on)",
    )
    parser.add_argument(
        "--early-handoff",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="move a prompt's keys and values to a decode worker with room to spare while the "
        "rest of it is computed (default: on)",
    )
    parser.add_argument(
        "--poison-freed-pages",
        action="store_true",
        help="overwrite pages that are freed with NaN, to find whoever still reads them; slow",
    )


def add_http(parser: Parser) -> None:
    http = parser.add_argument_group("HTTP")
    http.add_argument(
        "--host",
        default=DEFAULT_HOST,
        help=f"address to listen on (default {DEFAULT_HOST}: this machine only)",
    )
    http.add_argument(
        "--port",
        type=values.port,
        metavar="N",
        default=DEFAULT_PORT,
        help=f"port to listen on; 0 takes a free one (default {DEFAULT_PORT})",
    )


def add_log(parser: Target) -> None:
    parser.add_argument(
        "--log",
        type=values.path,
        metavar="FILE",
        help="file that log lines are appended to "
        "(default ${XDG_STATE_HOME:-~/.local/state}/tidegate/log.jsonl)",
    )
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        default=DEFAULT_LEVEL,
        help="the least level that is logged: debug adds a line for each launch of a worker; "
        "with warning or error tidegate logs has nothing to tell of requests "
        f"(default {DEFAULT_LEVEL})",
    )


def add_lifeline(parser: Parser) -> None:
    """Handed down by the supervisor, and of no use to people."""
    parser.add_argument("--lifeline-fd", type=values.descriptor, help=argparse.SUPPRESS)


def add_fence(parser: Parser) -> None:
    """Handed down by the supervisor, and of no use to people."""
    parser.add_argument("--fence-fd", type=values.descriptor, help=argparse.SUPPRESS)
