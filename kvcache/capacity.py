"""What a server's pools hold: the longest prompt, and how many requests run at once.

The planner compares servers with it. Every count of pages comes from `demand`, as the door's
and the sizer's do, so that what is planned is what is served.
"""

from math import lcm

import msgspec

from tidegate.kvcache.demand import (
    Leg,
    Lengths,
    Pace,
    Phase,
    demand,
    floors,
    keeps_windows,
    phases_of,
)
from tidegate.kvcache.layout import (
    All,
    Group,
    Layout,
    Pages,
    Tail,
    TensorSpec,
    Tokens,
)
from tidegate.kvcache.sizer import largest, longest_prompt

CONTEXT = "context"  # Named in place of a pool where the model's context is the limit.
ROWS = "rows"  # And where the count of rows is.


class PlannedWorker(msgspec.Struct, frozen=True):
    """A worker's pools, and which legs of a request it may run."""

    name: str
    legs: tuple[Leg, ...]
    page_counts: tuple[Pages, ...]


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that runs requests whole, or one source and one target.

    `is_capped_by_window` refuses every prompt that is longer than the smallest window pool.
    """

    layout: Layout
    workers: tuple[PlannedWorker, ...]
    context: Tokens
    row_count: int
    pace: Pace
    is_capped_by_window: bool = False


class Limit(msgspec.Struct, frozen=True):
    """What is too small: a worker's pool. `worker` is empty where it is the model's context."""

    worker: str
    pool: str


class Longest(msgspec.Struct, frozen=True):
    """The longest prompt, 0 if none fits, and what refuses a longer one."""

    tokens: Tokens
    limit: Limit


class Count(msgspec.Struct, frozen=True):
    """How many requests run at once, and the pool (or `ROWS`) that allows no more."""

    requests: int
    limit: str


class AtOnce(msgspec.Struct, frozen=True):
    """Requests of one size on one worker.

    `floors`: each of them can run to its end. `targets`: each of them at full speed.
    """

    worker: str
    floors: Count
    targets: Count


def longest(server: Server, output: Tokens) -> Longest:
    """The longest prompt that runs to the end with `output` new tokens."""
    tokens = min(
        longest_prompt(
            server.layout, worker.page_counts, leg, context=server.context, output=output
        )
        for worker, leg in sides(server, output)
    )
    cap = window_cap(server) if server.is_capped_by_window else None
    if cap is not None:
        tokens = min(tokens, cap[1])
    limit = refused_by(server, Lengths(Tokens(tokens + 1), output))
    assert limit is not None, "a longer prompt fits too"
    return Longest(tokens, limit)


def at_once(server: Server, lengths: Lengths) -> tuple[AtOnce, ...]:
    """For each worker that runs a part of such requests. `refused_by` must be None."""
    assert refused_by(server, lengths) is None
    return tuple(
        AtOnce(
            worker.name,
            _count(server, worker, _floor_uses(server.layout, leg, lengths), 0),
            _count(
                server,
                worker,
                _target_uses(server.layout, leg, lengths, server.pace),
                server.pace.chunks_in_flight,
            ),
        )
        for worker, leg in sides(server, lengths.output)
    )


def refused_by(server: Server, lengths: Lengths) -> Limit | None:
    """What refuses a request at the door; None if it runs to its end on the idle server."""
    if lengths.end > server.context:
        return Limit("", CONTEXT)
    cap = window_cap(server) if server.is_capped_by_window else None
    if cap is not None and lengths.prompt > cap[1]:
        return cap[0]
    short = [
        (group.start_of(count), Limit(worker.name, group.name))
        for worker, leg in sides(server, lengths.output)
        for group, need, count in zip(
            server.layout.groups,
            floors(server.layout, leg, lengths),
            worker.page_counts,
            strict=True,
        )
        if need > count
    ]
    # Where several are too small, the one for the fewest tokens is named, as the door does.
    return min(short, key=lambda found: found[0], default=(0, None))[1]


def sides(server: Server, output: int) -> list[tuple[PlannedWorker, Leg]]:
    """Which worker runs which leg. A single token needs no hand-off."""
    wanted: tuple[Leg, ...] = (Leg.SOURCE, Leg.TARGET)
    if output == 1 or all(worker.legs == (Leg.WHOLE,) for worker in server.workers):
        wanted = (Leg.WHOLE,)
    found = [(worker, leg) for leg in wanted for worker in server.workers if leg in worker.legs]
    assert len(found) == len(wanted), "a planned server has one worker for each leg"
    return found


def window_cap(server: Server) -> tuple[Limit, Tokens] | None:
    """The smallest window pool and its tokens; None for a model without window layers."""
    caps = [
        (Limit(worker.name, group.name), group.start_of(count))
        for worker in server.workers
        for group, count in zip(server.layout.groups, worker.page_counts, strict=True)
        if group.is_window
    ]
    return min(caps, key=lambda cap: cap[1], default=None)


def handoff_bytes(layout: Layout, prompt: Tokens) -> int:
    """What the hand-off of a prompt of so many tokens moves, in whole pages."""
    # The rest of the lengths and the pace do not matter to what is moved.
    lengths, pace = Lengths(prompt, Tokens(2)), Pace(None, 1, Tokens(1))
    keeps = keeps_windows(Leg.SOURCE, layout.swa_only_transfer)
    return sum(
        demand(group, Phase.HANDOFF, lengths, pace, whole_prompt=keeps).floor * group.page_bytes
        for group in layout.groups
    )


def without_windows(layout: Layout) -> Layout:
    """The same tensors with one cache for every position of every layer.

    Tails stay: they are working memory of compressed layers, not a cache.
    """
    merged = [group for group in layout.groups if not isinstance(group.reach, Tail)]
    tensors: tuple[TensorSpec, ...] = sum((group.tensors for group in merged), ())
    page_tokens = Tokens(lcm(*(group.page_tokens for group in merged)))
    tails = [group for group in layout.groups if isinstance(group.reach, Tail)]
    return Layout((Group("full", All(), page_tokens, tensors), *tails), None)


def _floor_uses(layout: Layout, leg: Leg, lengths: Lengths) -> list[tuple[Pages, Pages]]:
    return [(need, need) for need in floors(layout, leg, lengths)]


def _target_uses(
    layout: Layout, leg: Leg, lengths: Lengths, pace: Pace
) -> list[tuple[Pages, Pages]]:
    """For each group: pages of a request with a chunk in flight, and of any other one.

    Only a few chunks are in flight on a worker at a time. Another prompt that is under way
    holds the floor of its prefill until its next chunk.
    """
    keeps = keeps_windows(leg, layout.swa_only_transfer)
    uses: list[tuple[Pages, Pages]] = []
    for group in layout.groups:
        other = Pages(0)
        chunk = Pages(0)
        for phase in phases_of(leg, lengths):
            need = demand(group, phase, lengths, pace, whole_prompt=keeps)
            other = max(other, need.floor if phase is Phase.PREFILL else need.target)
            chunk = max(chunk, need.target)
        uses.append((chunk, other))
    return uses


def _count(
    server: Server,
    worker: PlannedWorker,
    uses: list[tuple[Pages, Pages]],
    chunks_in_flight: int,
) -> Count:
    """The most requests whose uses fit the worker's pools, and what is too small for more."""

    def short(requests: int) -> str | None:
        """The first group that cannot hold as many."""
        chunks = min(requests, chunks_in_flight)
        for group, (chunk, other), count in zip(
            server.layout.groups, uses, worker.page_counts, strict=True
        ):
            if chunks * chunk + (requests - chunks) * other > count:
                return group.name
        return None

    requests = largest(lambda number: short(number) is None, server.row_count)
    limit = ROWS if requests == server.row_count else short(requests + 1)
    assert limit is not None, "more requests fit too"
    return Count(requests, limit)
