"""What `tidegate serve` prints when a token can flow."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tidegate.clients.logs.words import bytes_text, columns
from tidegate.ipc.protocol import PoolState, Role, Status
from tidegate.kvcache.layout import Pages, Tokens, token_capacity

# A base model only continues text, best of all a list.
COMPLETION_PROMPT = "One, two, three, four,"
CHAT_QUESTION = "What is the capital of France?"


class Served(msgspec.Struct, frozen=True):
    """What is known before the server is ready."""

    url: str
    model: str
    has_chat_template: bool
    device: str
    dtype: str
    log: Path
    client_endpoint: str


def ready_text(served: Served, status: Status) -> str:
    """Address, pools, the longest prompt, where the log is, and a line to paste."""
    facts = [
        ("longest prompt", f"{status.longest_prompt:,} tokens"),
        ("max_tokens, if absent", f"{status.default_max_tokens:,} (--default-max-tokens)"),
        ("log", str(served.log)),
        ("for tidegate.Client", served.client_endpoint),
    ]
    return "\n".join(
        [
            "",
            f"tidegate serves {served.model} at {served.url}  "
            f"({served.dtype} on {served.device})",
            "",
            *(f"  {line}" for line in _pool_lines(status.pools)),
            "",
            *(f"  {line}" for line in columns(facts)),
            "",
            "Try it:",
            "",
            f"  {curl_line(served)}",
            "",
            "Ctrl-C stops it.",
            "",
        ]
    )


def curl_line(served: Served) -> str:
    """A first request: a chat where the model has a template for it, else a completion."""
    body: dict[str, object] = {"model": served.model}
    if served.has_chat_template:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": CHAT_QUESTION}]
    else:
        path = "completions"
        body["prompt"] = COMPLETION_PROMPT
    body |= {"max_tokens": 24, "temperature": 0}
    text = json.dumps(body).replace("'", "'\\''")
    return f"curl {served.url}/v1/{path} -H 'Content-Type: application/json' -d '{text}'"


def _pool_lines(pools: Sequence[PoolState]) -> list[str]:
    order = {Role.PREFILL: 0, Role.DECODE: 1, Role.BOTH: 2}
    rows = [("worker", "pool", "tokens", "pages", "bytes")]
    rows.extend(
        (
            pool.worker,
            pool.pool,
            f"{token_capacity(Pages(pool.page_count), Tokens(pool.page_tokens)):,}",
            f"{pool.page_count:,} of {pool.page_tokens}",
            bytes_text(pool.page_count * pool.page_bytes),
        )
        for pool in sorted(pools, key=lambda pool: (order[pool.role], pool.worker))
    )
    return columns(rows, right=(2, 3, 4))
