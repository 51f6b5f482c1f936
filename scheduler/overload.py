"""Overload: a queue that is full says so at once, and when to come back.

The queue is bounded by requests and by tokens of their prompts, for each tenant and for all
together. Who meets the bound of its own tenant is answered 429: others are served. Who meets
that of all is answered 503. A prompt that is larger than a bound of tokens is taken when none
other waits: what can run on an idle fleet is never refused on one.

When to come back is estimated: after the time in which what waits now would have begun at the
speed of late, for a tenant at its share of that.
"""

import msgspec

from tidegate.scheduler.door import Refusal
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.queues import Load


class Overload(msgspec.Struct, frozen=True):
    refusal: Refusal
    retry_after_ms: int


def find_overload(
    fleet: Fleet, tenant: str, prompt_tokens: int, now_us: int
) -> Overload | None:
    """None if the queue has room for a request of the tenant."""
    settings, queue = fleet.settings, fleet.waiting
    load = queue.loads.get(tenant)
    if load is not None:
        whose = f"tenant {tenant!r}" if tenant else "those who name no tenant"
        counts = settings.tenant_waiting_count_max, settings.tenant_waiting_tokens_max
        text = _excess(load, prompt_tokens, *counts, f"of {whose} ")
        if text:
            share = queue.share(tenant)
            refusal = Refusal(429, "tenant_queue_full", text)
            return Overload(refusal, _retry_after_ms(fleet, load, share, now_us))
    counts = settings.waiting_count_max, settings.waiting_tokens_max
    text = _excess(queue.load, prompt_tokens, *counts, "")
    if text:
        refusal = Refusal(503, "queue_full", text)
        return Overload(refusal, _retry_after_ms(fleet, queue.load, 1.0, now_us))
    return None


def _excess(
    load: Load, prompt_tokens: int, count_max: int | None, tokens_max: int | None, whose: str
) -> str:
    """Which bound one more request would exceed; empty if none."""
    if count_max is not None and load.count >= count_max:
        requests, are = ("request", "is") if load.count == 1 else ("requests", "are")
        return f"{load.count:,} {requests} {whose}{are} waiting already, and no more may"
    tokens = load.prompt_tokens + prompt_tokens
    if load.count and tokens_max is not None and tokens > tokens_max:
        return (
            f"prompts {whose}with {load.prompt_tokens:,} tokens are waiting already; with the "
            f"{prompt_tokens:,} of this one it would be more than {tokens_max:,}"
        )
    return ""


def _retry_after_ms(fleet: Fleet, load: Load, share: float, now_us: int) -> int:
    settings = fleet.settings
    rate = fleet.begun_tokens.per_second(now_us)
    if rate is None:
        return settings.retry_after_ms
    wait_ms = load.prompt_tokens / (rate * share) * 1000 if rate else float("inf")
    return round(min(max(wait_ms, settings.retry_after_ms), settings.retry_after_ms_max))
