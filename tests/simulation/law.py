"""The law of admission on one fleet: a request is accepted if and only if it runs to its end.

A *case* is a fleet and its settings. Its requests come one by one, each to an idle fleet. The
desk compares each answer with a walk over positions (`simulation.reference`), and every token
and every page that is read with what it should be. What is checked here beside that: that an
accepted request brings all that it was promised and leaves no page behind, and that a refusal
names a pool that is too small, and by how much.
"""

from collections.abc import Iterable, Iterator
from math import inf
from random import Random

import msgspec

from simulation.desk import CONTEXT
from simulation.instant import InstantFleet
from simulation.reference import (
    may_ever_run,
    source_needs,
    target_needs,
    walk_of,
    whole_needs,
)
from simulation.scripts import Script
from tidegate.ipc.protocol import EndReason, Incarnation, PoolHandle, PoolId, Role, WorkerId
from tidegate.kvcache.demand import Lengths
from tidegate.kvcache.layout import All, Group, Layout, Pages, Tokens, Window
from tidegate.kvcache.units import unit_tokens
from tidegate.scheduler.commands import FinishRequest, RefuseRequest
from tidegate.scheduler.core import Core
from tidegate.scheduler.door import Refusal, find_refusal
from tidegate.scheduler.events import WorkerJoined
from tidegate.scheduler.settings import CoreSettings

NEAR = range(-2, 3)
Pools = tuple[tuple[Role, tuple[int, ...]], ...]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its settings. `pools` has for each worker pages of each group."""

    layout: Layout
    pools: Pools
    chunk: int | None = None
    ahead: int = 32
    default_max_tokens: int = 9
    caches: bool = False  # Are prompts cached on the workers that prefill?

    @property
    def settings(self) -> CoreSettings:
        return CoreSettings(
            chunk_tokens=None if self.chunk is None else Tokens(self.chunk),
            ahead_tokens=Tokens(self.ahead),
            default_max_tokens=self.default_max_tokens,
            prefix_cache=self.caches,
        )

    def may_run(self, prompt: int, output: int) -> bool:
        """By the walk, on some choice of workers."""
        fleet = [(role, self.layout, counts) for role, counts in self.pools]
        return may_ever_run(fleet, Script(0, prompt, output), self.default_max_tokens)


class Trial:
    """A case that is tried. Counts tell that what was to be tried has come about."""

    def __init__(self, case: Case, *, checks: bool = False) -> None:
        self.case = case
        self.accepted_count = 0
        self.refused_count = 0
        self.cached_tokens = 0
        self.fleet = InstantFleet(
            case.layout, case.pools, case.settings, steps_max=case.ahead, checks=checks
        )
        self._unit = unit_tokens(case.layout)

    def check(self, prompt: int, output: int | None, shared: int = 0) -> bool:
        """Submit a request and assert the law. Was it accepted?

        Its first `shared` tokens are those of all others that share some.
        """
        answer = self.fleet.run(prompt, output, shared)
        if isinstance(answer, FinishRequest):
            self.accepted_count += 1
            assert answer.reason is EndReason.LENGTH, answer
            promised = self._largest_output(prompt) if output is None else output
            assert answer.usage.output_tokens == promised, answer
            cached = answer.usage.cached_tokens
            assert cached <= min(shared, prompt - 1) and cached % self._unit == 0, answer
            assert not cached or self.case.caches, answer
            self.cached_tokens += cached
        else:
            self.refused_count += 1
            least = min(2, self.case.default_max_tokens)
            self._check_refusal(answer, prompt, least if output is None else output)
        for worker in self.fleet.desk.core.fleet.workers.values():
            for pool in worker.books.pools:
                assert pool.free_count + pool.idle_count == pool.page_count, "a page is lost"
        return isinstance(answer, FinishRequest)

    def end(self) -> None:
        """Assert what must be true of the fleet after all requests."""
        core = self.fleet.desk.core
        core.check()
        for worker in core.fleet.workers.values():
            worker.books.evict_all()
            assert all(pool.free_count == pool.page_count for pool in worker.books.pools)

    def _largest_output(self, prompt: int) -> int:
        outputs = range(1, self.case.default_max_tokens + 1)
        return max(output for output in outputs if self.case.may_run(prompt, output))

    def _check_refusal(self, refused: RefuseRequest, prompt: int, output: int) -> None:
        layout = self.case.layout
        assert (refused.status, refused.code) == (400, "kv_pool_exceeded")
        role, counts = self.case.pools[int(refused.worker.rpartition("-")[2])]
        assert refused.role == role.value
        index = [group.name for group in layout.groups].index(refused.pool)
        end = prompt + output - 1
        if role is Role.DECODE:
            needs = target_needs(layout, prompt, end)
        elif role is Role.BOTH or output == 1:
            needs = whole_needs(layout, end)
        else:
            needs = source_needs(layout, prompt)
        assert (refused.needed, refused.limit) == (needs[index], counts[index])
        assert refused.needed > refused.limit
        group = layout.groups[index]
        if layout.swa_only_transfer is not False or role is Role.BOTH or output == 1:
            assert refused.limit < ever_needed(group), (
                "a window refuses for the prompt's length"
            )


class Door:
    """The door of a case alone: pools may be of any size, as nothing is run."""

    def __init__(self, case: Case) -> None:
        core = Core(case.settings)
        for index, (role, counts) in enumerate(case.pools):
            name = f"{role.value}-{index}"
            handle = PoolHandle("memory", name, 0, tuple(map(Pages, counts)))
            pool = PoolId(name)
            joined = WorkerJoined(
                WorkerId(name), role, pool, Incarnation(1), case.layout, CONTEXT, handle, 1
            )
            core.apply(joined, 0)
        self._workers = list(core.fleet.workers.values())

    def refusal(self, prompt: int, output: int) -> Refusal | None:
        return find_refusal(self._workers, Lengths(Tokens(prompt), Tokens(output)))


def ever_needed(group: Group) -> float:
    """The most pages that any query needs, however long its prompt is."""
    match group.reach:
        case All():
            return inf
        case Window(tokens=tokens):
            return walk_of(group).most(tokens + 2 * group.page_tokens)
        case _:
            ratio, page_tokens = group.reach.ratio, group.page_tokens
            return walk_of(group).most(ratio * (group.reach.overlap + 1 + page_tokens))


def edges(case: Case) -> set[int]:
    """Lengths at which something changes: ends of pages, chunks, windows and pools."""
    layout = case.layout
    found = {1}
    for index, group in enumerate(layout.groups):
        capacities = {counts[index] * group.page_tokens for _, counts in case.pools}
        found |= capacities
        if isinstance(group.reach, Window):
            tokens = group.reach.tokens
            found |= {tokens, 2 * tokens, tokens + group.page_tokens}
    last = longest(case)
    for step in (case.chunk, *(group.page_tokens for group in layout.groups)):
        if step is not None:
            found |= set(range(step, last + 1, step))
    return {edge for edge in found if edge <= last}


def longest(case: Case) -> int:
    """A page and a bit more than the largest pool without an end holds, or two windows."""
    groups = list(enumerate(case.layout.groups))
    full = [
        (max(counts[index] for _, counts in case.pools) + 1) * group.page_tokens
        for index, group in groups
        if isinstance(group.reach, All)
    ]
    windows = [
        2 * group.reach.tokens + 2 * group.page_tokens
        for _, group in groups
        if isinstance(group.reach, Window)
    ]
    return 2 + (max(full) if full else max(windows, default=64))


def near(points: Iterable[int], last: int) -> list[int]:
    """All lengths within 2 of these, from 1 on."""
    return sorted({point + by for point in points for by in NEAR if 1 <= point + by <= last})


def requests_near(
    case: Case, random: Random, count: int
) -> Iterator[tuple[int, int | None, int]]:
    """`count` requests: prompt, output, and how much of the prompt is shared.

    Prompt and end are near edges, or the output is absent or small; it is at most twice the
    window, as more changes nothing that is not tried. What is shared ends near an edge too.
    """
    lengths = near(edges(case), longest(case))
    widest = max((group.window_tokens or 0 for group in case.layout.groups), default=0)
    output_max = 2 * widest or lengths[-1]
    while count:
        prompt, end = random.choice(lengths), random.choice(lengths)
        to_end = end - prompt + 1
        output = random.choice((1, 2, 3, None, to_end, to_end))
        if output is None or 1 <= output <= output_max:
            shared = min(prompt, random.choice((prompt, random.choice(lengths))))
            yield prompt, output, shared
            count -= 1
