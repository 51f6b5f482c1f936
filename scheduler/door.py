"""The door: may this request ever run on this fleet? Floors against pool totals.

A request runs whole on one worker of role `both`; or with a single token to sample on a
prefill worker; or as a pair, prefilled on one worker and decoded on another. It is refused
only if no such choice holds it, and the answer names the pool, the need and the limit.
"""

from collections.abc import Iterable, Sequence
from operator import le

import msgspec

from tidegate.ipc.protocol import Role
from tidegate.kvcache.demand import Leg, Lengths, floors
from tidegate.kvcache.layout import Pages, Tokens
from tidegate.scheduler.state import Request, Worker


class Refusal(msgspec.Struct, frozen=True):
    """Why a request cannot run. Counts are pages, or tokens where the pool is "context"."""

    status: int
    code: str
    text: str
    pool: str = ""
    needed: int = 0
    limit: int = 0
    role: str = ""
    worker: str = ""


class Shortage(msgspec.Struct, frozen=True):
    """One worker's pool that one leg of a request does not fit."""

    worker: Worker
    group: int
    needed: int
    limit: int

    @property
    def tokens_limit(self) -> int:
        return self.worker.layout.groups[self.group].start_of(Pages(self.limit))


def shortage(worker: Worker, leg: Leg, lengths: Lengths) -> Shortage | None:
    """The tightest pool of the worker that can never hold this leg; None if it fits."""
    needs = floors(worker.layout, leg, lengths)
    short = [
        Shortage(worker, group, needed, limit)
        for group, (needed, limit) in enumerate(
            zip(needs, worker.books.page_counts, strict=True)
        )
        if needed > limit
    ]
    return min(short, key=lambda s: s.tokens_limit, default=None)


def whole_workers(workers: Iterable[Worker], lengths: Lengths) -> list[Worker]:
    """Workers that could run the request from beginning to end, whatever their size."""
    roles = (Role.BOTH, Role.PREFILL) if lengths.output == 1 else (Role.BOTH,)
    return [worker for worker in workers if worker.role in roles]


def of_role(workers: Iterable[Worker], role: Role) -> list[Worker]:
    return [worker for worker in workers if worker.role is role]


class Choice(msgspec.Struct, frozen=True):
    """Workers on any of which a leg of these lengths fits, when nothing else is there."""

    leg: Leg
    lengths: Lengths
    workers: tuple[Worker, ...]


def holding(workers: Iterable[Worker], leg: Leg, lengths: Lengths) -> list[Worker]:
    """Those of the workers whose pools hold the leg."""
    found: list[Worker] = []
    layout, needs = None, tuple[Pages, ...]()
    for worker in workers:
        if worker.layout is not layout:  # It is the same object for most of them, or all.
            layout, needs = worker.layout, floors(worker.layout, leg, lengths)
        if all(map(le, needs, worker.books.page_counts)):
            found.append(worker)
    return found


def admission_choices(workers: Sequence[Worker], request: Request) -> list[Choice]:
    """Where the request may begin, or begin anew, in order of preference. None if nowhere.

    A request that begins anew has its tokens so far in its prompt, which may by now be too
    long for every prefill worker. Its decode worker holds it by the door's check, and every
    worker can run prefill chunks: then it runs there from beginning to end.
    """
    lengths = request.remaining
    choices = [Choice(Leg.WHOLE, lengths, tuple(_whole(workers, lengths)))]
    if lengths.output > 1 and holding(of_role(workers, Role.DECODE), Leg.TARGET, lengths):
        sources = holding(of_role(workers, Role.PREFILL), Leg.SOURCE, lengths)
        choices.append(Choice(Leg.SOURCE, lengths, tuple(sources)))
    choices = [choice for choice in choices if choice.workers]
    if not choices and request.output_count > 0:
        decoders = holding(of_role(workers, Role.DECODE), Leg.WHOLE, lengths)
        choices = [Choice(Leg.WHOLE, lengths, tuple(decoders))] if decoders else []
    return choices


def _whole(workers: Iterable[Worker], lengths: Lengths) -> list[Worker]:
    return holding(whole_workers(workers, lengths), Leg.WHOLE, lengths)


def admit_max_tokens(
    workers: Sequence[Worker], prompt_tokens: int, max_tokens: int | None, default: int
) -> int | Refusal:
    """The max_tokens that the request gets, or why it can never run.

    An absent `max_tokens` becomes the largest that fits, at most `default`, and needs room for
    two tokens at least.
    """
    if prompt_tokens < 1:
        return Refusal(400, "empty_prompt", "the prompt must have at least one token")
    if max_tokens is not None:
        if max_tokens < 1:
            return Refusal(400, "bad_max_tokens", f"max_tokens must be >= 1, got {max_tokens}")
        refusal = find_refusal(workers, Lengths(Tokens(prompt_tokens), Tokens(max_tokens)))
        return max_tokens if refusal is None else refusal
    least = min(2, default)
    refusal = find_refusal(workers, Lengths(Tokens(prompt_tokens), Tokens(least)))
    if refusal is not None:
        return refusal
    fits, beyond = least, default + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if find_refusal(workers, Lengths(Tokens(prompt_tokens), Tokens(middle))) is None:
            fits = middle
        else:
            beyond = middle
    return fits


def find_refusal(workers: Sequence[Worker], lengths: Lengths) -> Refusal | None:
    """None if some choice of workers holds the request to its end on an idle fleet."""
    if not workers:
        return Refusal(503, "no_worker", "there is no worker")
    context = max(worker.context for worker in workers)
    if lengths.end > context:
        return _beyond_context(lengths, context)
    wholes = whole_workers(workers, lengths)
    sources = of_role(workers, Role.PREFILL)
    targets = of_role(workers, Role.DECODE)
    shortages: list[Shortage] = []
    for worker in wholes:
        short = shortage(worker, Leg.WHOLE, lengths)
        if short is None:
            return None
        shortages.append(short)
    if lengths.output > 1 and sources and targets:
        short_source = _least(shortage(worker, Leg.SOURCE, lengths) for worker in sources)
        short_target = _least(shortage(worker, Leg.TARGET, lengths) for worker in targets)
        if short_source is None and short_target is None:
            return None
        # A pair is as roomy as the tighter of its two sides.
        pair = [short for short in (short_source, short_target) if short is not None]
        shortages.append(min(pair, key=lambda short: short.tokens_limit))
    if not shortages:
        return _no_role(lengths, sources, targets)
    return _too_large(lengths, max(shortages, key=lambda short: short.tokens_limit))


def _least(shortages: Iterable[Shortage | None]) -> Shortage | None:
    """None if some worker of a role holds the leg; else the shortage of the roomiest."""
    worst: Shortage | None = None
    for short in shortages:
        if short is None:
            return None
        if worst is None or short.tokens_limit > worst.tokens_limit:
            worst = short
    return worst


def _beyond_context(lengths: Lengths, context: int) -> Refusal:
    return Refusal(
        400,
        "context_length_exceeded",
        f"the model's context is {context} tokens, but the request covers {lengths.end} "
        f"({lengths.prompt} in the prompt, {lengths.output} new, the last one not fed)",
        pool="context",
        needed=lengths.end,
        limit=context,
    )


def _no_role(lengths: Lengths, sources: Sequence[Worker], targets: Sequence[Worker]) -> Refusal:
    missing = Role.PREFILL if not sources else Role.DECODE
    assert missing is Role.PREFILL or not targets
    return Refusal(503, "no_worker", f"there is no {missing.value} worker", role=missing.value)


def _too_large(lengths: Lengths, short: Shortage) -> Refusal:
    group = short.worker.layout.groups[short.group]
    role = short.worker.role.value
    return Refusal(
        400,
        "kv_pool_exceeded",
        f"a prompt of {lengths.prompt} tokens with {lengths.output} new ones needs "
        f"{short.needed} pages of the {group.name} pool, and {role} worker "
        f"{short.worker.worker_id} has {short.limit} "
        f"(of {group.page_tokens} tokens each, {short.tokens_limit} in all)",
        pool=group.name,
        needed=short.needed,
        limit=short.limit,
        role=role,
        worker=short.worker.worker_id,
    )
