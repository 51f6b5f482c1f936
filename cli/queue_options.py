"""Options about the queue: its bounds, and the shares of tenants."""

import argparse
from collections.abc import Sequence

from tidegate.cli import values
from tidegate.cli.options import Target

DEFAULT_QUEUE_REQUESTS = 2048
DEFAULT_QUEUE_TOKENS = 4 * 1024 * 1024
DEFAULT_BYPASS_REQUESTS = 8
DEFAULT_BYPASS_TOKENS = 32_768


def add_queue(parser: Target) -> None:
    """How much may wait, in all and of one tenant, and whose turn it is."""
    parser.add_argument(
        "--queue-requests",
        type=values.count,
        metavar="N",
        default=DEFAULT_QUEUE_REQUESTS,
        help="requests that may wait; one more is answered with 503 at once "
        f"(default {DEFAULT_QUEUE_REQUESTS})",
    )
    parser.add_argument(
        "--queue-tokens",
        type=values.count,
        metavar="N",
        default=DEFAULT_QUEUE_TOKENS,
        help="tokens that the prompts of those may have together "
        f"(default {DEFAULT_QUEUE_TOKENS})",
    )
    parser.add_argument(
        "--tenant-queue-requests",
        type=values.count,
        metavar="N",
        help="requests of one tenant that may wait; one more is answered with 429 at once, and "
        "others are still taken (default: half of --queue-requests)",
    )
    parser.add_argument(
        "--tenant-queue-tokens",
        type=values.count,
        metavar="N",
        help="tokens that the prompts of those may have together "
        "(default: half of --queue-tokens)",
    )
    parser.add_argument(
        "--bypass-requests",
        type=values.count_or_zero,
        metavar="N",
        default=DEFAULT_BYPASS_REQUESTS,
        help="requests that may begin before one that waits for pages, where they fit; after "
        f"that nobody passes it (default {DEFAULT_BYPASS_REQUESTS}; 0: none)",
    )
    parser.add_argument(
        "--bypass-tokens",
        type=values.count_or_zero,
        metavar="N",
        default=DEFAULT_BYPASS_TOKENS,
        help="what those may come to together: for each its prompt's tokens and four times its "
        f"max_tokens (default {DEFAULT_BYPASS_TOKENS})",
    )
    parser.add_argument(
        "--tenant-weight",
        type=values.tenant_weight,
        metavar="NAME=W",
        action="append",
        default=[],
        help="a tenant's share of service while others wait, too: 2 is twice that of a tenant "
        "that is not named; may be given again for others. Tenants are named by the header "
        "X-Tidegate-Tenant, or by the library's option tenant",
    )


def tenant_weights(arguments: argparse.Namespace) -> dict[str, float]:
    pairs: Sequence[tuple[str, float]] = arguments.tenant_weight
    return dict(pairs)


def half_of(whole: int) -> int:
    return max(1, whole // 2)
