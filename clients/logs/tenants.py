"""What each tenant of a log was given, for `tidegate logs summary`."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from tidegate.clients.logs.spread import Spread, spread
from tidegate.clients.logs.words import columns, count_text, time_text

FAILURES = ("timeout", "error")
HEADS = (
    "requests",
    "cancelled",
    "failed",
    "refused",
    "prompt",
    "output",
    "charged",
    "share",
    "queue p50",
    "p95",
)
SHOWN_COUNT_MAX = 20  # Tenants in the summary for people; the others are added up.


class Served(msgspec.Struct, frozen=True):
    """One request that has ended. Without a name of its tenant that is empty."""

    tenant: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    charged_tokens: int
    queue_us: int | None


class TenantService(msgspec.Struct, frozen=True):
    """One tenant's requests. `charged_tokens` is what its share of service is counted in."""

    tenant: str
    finished: int
    reasons: dict[str, int]  # Why they ended, the most frequent first.
    refused: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    charged_tokens: int
    queue: Spread | None


def service_of(served: Iterable[Served], refused: Iterable[str]) -> list[TenantService]:
    """By tenant, the one that was given most first. `refused` names a tenant each time."""
    by_tenant: dict[str, list[Served]] = {}
    refusals: dict[str, int] = {}
    for one in served:
        by_tenant.setdefault(one.tenant, []).append(one)
    for tenant in refused:
        refusals[tenant] = refusals.get(tenant, 0) + 1
    found = [
        TenantService(
            tenant,
            len(mine := by_tenant.get(tenant, [])),
            dict(Counter(one.reason for one in mine).most_common()),
            refusals.get(tenant, 0),
            sum(one.prompt_tokens for one in mine),
            sum(one.cached_tokens for one in mine),
            sum(one.output_tokens for one in mine),
            sum(one.charged_tokens for one in mine),
            spread(one.queue_us for one in mine if one.queue_us is not None),
        )
        for tenant in (by_tenant | refusals)
    ]
    return sorted(found, key=lambda one: (-one.charged_tokens, one.tenant))


def render_tenants(tenants: Sequence[TenantService]) -> str:
    """A table; nothing if no tenant has a name."""
    if not any(one.tenant for one in tenants):
        return ""
    whole = sum(one.charged_tokens for one in tenants)
    rows: list[tuple[str, ...]] = [("tenants", *HEADS)]
    for one in tenants[:SHOWN_COUNT_MAX]:
        queue = one.queue
        rows.append(
            (
                f"  {one.tenant or '(no name)'}",
                f"{one.finished:,}",
                f"{one.reasons.get('cancelled', 0):,}",
                f"{sum(one.reasons.get(reason, 0) for reason in FAILURES):,}",
                f"{one.refused:,}",
                f"{one.prompt_tokens:,}",
                f"{one.output_tokens:,}",
                f"{one.charged_tokens:,}",
                f"{100 * one.charged_tokens / whole:.1f} %" if whole else "-",
                "-" if queue is None else time_text(queue.p50_us),
                "-" if queue is None else time_text(queue.p95_us),
            )
        )
    lines = columns(rows, right=range(1, len(HEADS) + 1))
    others = tenants[SHOWN_COUNT_MAX:]
    if others:
        charged = sum(one.charged_tokens for one in others)
        lines.append(f"  {count_text(len(others), 'other')}, charged {charged:,} together")
    return "\n".join(lines)
