"""A plan as people read it."""

import textwrap
from collections.abc import Sequence

from tidegate.cli.planning import OURS, Plan, ServerFacts, SizeFacts, WorkerFacts
from tidegate.clients.logs.words import bytes_text, columns
from tidegate.kvcache.capacity import ROWS, Count, Limit

LINE_WIDTH = 96


def render(plan: Plan) -> str:
    """For a terminal."""
    servers = shown_servers(plan)
    sections = [
        [
            f"{plan.model}: {plan.family} family, {plan.layer_count} layers, context "
            f"{plan.context:,} tokens",
        ],
        _memory_lines(plan),
        pool_lines(plan),
        flag_lines(plan.workers),
        warning_lines(plan.workers),
        longest_lines(servers),
        _at_once_lines(plan, servers),
        _assumption_lines(plan, servers),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def shown_servers(plan: Plan) -> Sequence[ServerFacts]:
    """Without a window layer the others would be the same server."""
    has_window = any(
        pool.window_tokens is not None for worker in plan.workers for pool in worker.pools
    )
    return plan.servers if has_window else plan.servers[:1]


def _memory_lines(plan: Plan) -> list[str]:
    chunk = "no chunk budget" if plan.chunk_tokens is None else f"{plan.chunk_tokens:,} a chunk"
    bound = "" if plan.kv_memory is None else f"of {bytes_text(plan.kv_memory)} (--kv-memory)"
    rows = [
        ("each worker", "bytes", ""),
        ("weights, as loaded", bytes_text(plan.weight_bytes), plan.dtype),
        (
            "a launch, estimated",
            bytes_text(plan.workspace_bytes),
            f"{plan.max_running} requests, {chunk}",
        ),
        *(
            (
                "pools" if len(plan.workers) == 1 else f"pools, {worker.role} worker",
                bytes_text(sum(pool.byte_count for pool in worker.pools)),
                bound,
            )
            for worker in plan.workers
        ),
    ]
    return columns(rows, right=(1,))


def pool_lines(plan: Plan) -> list[str]:
    rows = [("worker", "pool", "reads", "bytes a token", "tokens", "pages", "bytes")]
    rows.extend(
        (
            worker.role,
            pool.name,
            pool.reads,
            f"{pool.bytes_per_token:,}",
            f"{pool.token_count:,}",
            f"{pool.page_count:,} of {pool.page_tokens}",
            bytes_text(pool.byte_count),
        )
        for worker in plan.workers
        for pool in worker.pools
    )
    return columns(rows, right=(3, 4, 5, 6))


def flag_lines(workers: Sequence[WorkerFacts]) -> list[str]:
    by_flag: dict[str, list[str]] = {}
    for worker in workers:
        flag = worker.swa_only_transfer
        shown = "does not apply" if flag is None else str(flag).lower()
        by_flag.setdefault(f"{shown}: {worker.reason}", []).append(worker.role)
    lines: list[str] = []
    for text, roles in by_flag.items():
        lines += wrapped(f"swa_only_transfer on {' and '.join(roles)} is {text}.")
    return lines


def warning_lines(workers: Sequence[WorkerFacts]) -> list[str]:
    roles_of: dict[str, list[str]] = {}
    for worker in workers:
        for text in worker.warnings:
            roles_of.setdefault(text, []).append(worker.role)
    lines: list[str] = []
    for text, roles in roles_of.items():
        lines += wrapped(f"warning ({' and '.join(roles)}): {text}")
    return lines


def longest_lines(servers: Sequence[ServerFacts]) -> list[str]:
    head = ["longest prompt, in tokens"]
    for found in servers[0].longest_prompts:
        head += [f"max_tokens {found.max_tokens:,}", "limited by"]
    rows = [head]
    for server in servers:
        row = [server.name]
        for found in server.longest_prompts:
            row += [f"{found.tokens:,}", _limit_text(found.limit)]
        rows.append(row)
    return columns(rows, right=range(1, len(head), 2))


def _at_once_lines(plan: Plan, servers: Sequence[ServerFacts]) -> list[str]:
    head = ["requests at once", ""]
    for worker in plan.workers:
        head += [f"{worker.role}: floors", "targets"]
    rows = [[*head, "refused by"]]
    for index, first in enumerate(servers[0].at_once):
        size = f"{first.size.prompt:,} + {first.size.max_tokens:,}"
        for server in servers:
            title = size if server.name == OURS else ""
            rows.append([title, server.name, *_counts(plan, server.at_once[index])])
    return columns(rows)


def _counts(plan: Plan, found: SizeFacts) -> list[str]:
    by_worker = {each.worker: each for each in found.workers}
    cells: list[str] = []
    for worker in plan.workers:
        each = by_worker.get(worker.role)
        cells += ["-", "-"] if each is None else [_count(each.floors), _count(each.targets)]
    return [*cells, "" if found.refused_by is None else _limit_text(found.refused_by)]


def _count(count: Count) -> str:
    return f"{count.requests:,} ({count.limit})"


def _limit_text(limit: Limit) -> str:
    return f"{limit.worker} {limit.pool}" if limit.worker else limit.pool


def _assumption_lines(plan: Plan, servers: Sequence[ServerFacts]) -> list[str]:
    texts = [f"{server.name}: {server.assumption}." for server in servers]
    if len(servers) == 1:
        texts.append("Other servers would have the same pool: there is nothing to compare.")
    texts += [
        "floors: each request can run to its end beside the others.",
        "targets: at full speed, with one chunk in flight on a worker and "
        f"{plan.ahead_tokens} tokens ahead.",
        "In brackets what allows no more: a pool, or the "
        f"{plan.max_running} {ROWS} of a worker (--max-running).",
    ]
    return ["Assumptions", *(line for text in texts for line in wrapped(text, "  "))]


def wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, LINE_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  "
    )
