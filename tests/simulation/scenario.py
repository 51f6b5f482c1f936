"""A whole run, drawn from one seed: fleet, settings, requests, and what goes wrong when."""

from collections.abc import Iterator, Sequence
from enum import Enum
from random import Random

import msgspec

from simulation.scripts import Script
from tidegate.ipc.protocol import EndReason, Role, WorkerId
from tidegate.kvcache.demand import Leg, Lengths, floors
from tidegate.kvcache.layout import All, Group, Layout, Reach, Tail, TensorSpec, Tokens, Window
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings

STALL_US = 20_000_000
QUEUE_US = 3_000_000_000
CANCEL_PHASES = (Phase.PREFILLING, Phase.HANDING_OFF, Phase.DECODING)
TIGHT_SEED_MIN = 1_000_000  # Seeds from here on draw fleets on which requests give way often.
ALIKE_SEED_MIN = 2_000_000  # Those from here on draw prompts that begin alike, and a cache.
SPREAD_US = 400_000  # Arrivals, cancellations and faults happen within about this time.


class Trouble(Enum):
    """What may go wrong in a run. None of it is drawn where it is not listed."""

    CANCEL = "cancel"  # Clients cancel, at any time.
    CLIENT = "client"  # Clients go away with all their requests.
    LOSS = "loss"  # Workers die; some come back with empty pools.
    STALL = "stall"  # Workers stop for longer than the stall timeout, then go on.
    FETCH = "fetch"  # Pulls fail.
    FAULT = "fault"  # Rows fail.
    TIMEOUT = "timeout"  # Requests bring a short timeout of their own.


class WorkerPlan(msgspec.Struct, frozen=True):
    """One worker and its ways. Times are in microseconds."""

    worker: WorkerId
    role: Role
    page_counts: tuple[int, ...]
    row_count: int
    steps_max: int
    depth: int
    is_cautious: bool
    launch_us: int
    pull_us: int
    skip_share: float  # Of the rows that are ready, how many sit out a launch.
    dies_at_us: int | None = None
    returns_after_us: int | None = None
    stalls_at_us: int | None = None
    stalls_for_us: int = 0


class Arrival(msgspec.Struct, frozen=True):
    """One request, and when its client cancels it, if it does.

    That is `cancel_after_us` after it arrives, or after it is first seen in `cancel_in`.
    """

    at_us: int
    client: str
    script: Script
    cancel_after_us: int | None = None
    cancel_in: Phase | None = None


class Scenario(msgspec.Struct, frozen=True):
    seed: int
    troubles: tuple[Trouble, ...]
    layout: Layout
    settings: CoreSettings
    workers: tuple[WorkerPlan, ...]
    arrivals: tuple[Arrival, ...]
    clients_gone: tuple[tuple[int, str], ...]
    clients_behind: tuple[tuple[int, int, str], ...]  # Who does not read, from when until when.
    delay_us_max: int
    turn_us_max: int  # How long what arrives may wait for the scheduler's next turn.
    fault_share: float
    fetch_error_share: float
    preempt_share: float = 0.0  # Of turns, before which some row gives way for no reason.


def draw(seed: int, troubles: tuple[Trouble, ...] | None = None) -> Scenario:
    """The scenario of a seed. `troubles` replaces the seed's own choice of them.

    In a tight one, pools that decode hold little more than the largest request, prompts are
    short and come soon, and outputs are long. In one of prompts alike, they are long, and
    their groups have pages of one size.
    """
    is_alike = seed >= ALIKE_SEED_MIN
    is_tight = TIGHT_SEED_MIN <= seed < ALIKE_SEED_MIN
    random = Random(seed)
    drawn = tuple(t for t in Trouble if random.random() < 0.35)
    if random.random() < 0.25:
        drawn = ()
    troubles = drawn if troubles is None else troubles
    layout = _layout(random, is_alike)
    chunk = random.choice([None, 1, 2, 3, 5, 8, 16, 40])
    settings = CoreSettings(
        chunk_tokens=None if chunk is None else Tokens(chunk),
        ahead_tokens=Tokens(random.choice([1, 2, 3, 4, 8, 32])),
        default_max_tokens=random.choice([1, 2, 8, 30]),
        waiting_count_max=random.choice([2, 100, 100, 100]),
        handoff_waiting_count_max=random.choice([1, 2, 16]),
        queue_timeout_us=QUEUE_US,
        stall_timeout_us=STALL_US,
        poison_freed_pages=random.random() < 0.8,
    )
    prompt_max = random.choice([4, 12, 40, 90])
    output_max = random.choice([1, 4, 16, 40])
    if is_tight:
        prompt_max, output_max = random.choice([4, 12]), random.choice([40, 80])
    if is_alike:
        prompt_max = random.choice([12, 40, 90])
    largest = Lengths(Tokens(prompt_max), Tokens(output_max))
    workers = _workers(random, layout, largest, troubles)
    if is_tight:
        workers = tuple(_tighten(random, worker, layout, largest) for worker in workers)
    arrivals, clients = _arrivals(random, prompt_max, output_max, troubles, is_tight)
    # With numbers of its own, so that a seed means the same with and without a cache.
    random_cache = Random(f"{seed} cache")
    fence_us = random_cache.choice([1_000_000, STALL_US, 10 * STALL_US])
    settings = msgspec.structs.replace(settings, fence_timeout_us=fence_us)
    caches = is_alike or random_cache.random() < 0.8
    settings = msgspec.structs.replace(settings, prefix_cache=caches)
    share = random_cache.choice([0.7, 1.0] if is_alike else [0.0, 0.5, 1.0])
    arrivals = tuple(_shared(random_cache, arrivals, prompt_max, share))
    random_chunks = Random(f"{seed} chunks")
    mixed = random_chunks.choice([None, 1, 2, 5, 16])
    settings = msgspec.structs.replace(
        settings,
        mixed_chunk_tokens=None if mixed is None else Tokens(mixed),
        chunks_in_flight=random_chunks.choice([1, 2, 2, 3]),
    )
    random_ahead = Random(f"{seed} ahead")
    ahead_max = settings.ahead_tokens * random_ahead.choice([1, 2, 8, 64])
    settings = msgspec.structs.replace(settings, ahead_tokens_max=Tokens(ahead_max))
    is_early = Random(f"{seed} early").random() < 0.8
    settings = msgspec.structs.replace(settings, early_handoff=is_early)
    random_tenants = Random(f"{seed} tenants")
    arrivals, weights = _with_tenants(random_tenants, arrivals)
    settings = msgspec.structs.replace(
        settings,
        tenant_weights=weights,
        waiting_tokens_max=random_tenants.choice([10_000] * 6 + [2 * prompt_max]),
        tenant_waiting_count_max=random_tenants.choice([None] * 6 + [3]),
        tenant_waiting_tokens_max=random_tenants.choice([None] * 6 + [prompt_max]),
    )
    random_bypass = Random(f"{seed} bypass")
    settings = msgspec.structs.replace(
        settings,
        bypass_count_max=random_bypass.choice([0, 1, 2, 4]),
        bypass_tokens_max=random_bypass.choice([20, 100, 400]),
    )
    if Trouble.TIMEOUT in troubles:
        arrivals = tuple(_with_deadlines(Random(f"{seed} deadlines"), arrivals))
    random_readers = Random(f"{seed} readers")
    behind = _behind(random_readers, clients)
    arrivals = tuple(_with_stop_text(random_readers, arrivals))
    gone = [
        (random.randrange(2 * SPREAD_US), client)
        for client in clients
        if Trouble.CLIENT in troubles and random.random() < 0.5
    ]
    return Scenario(
        seed=seed,
        troubles=troubles,
        layout=layout,
        settings=settings,
        workers=workers,
        arrivals=arrivals,
        clients_gone=tuple(gone),
        clients_behind=behind,
        delay_us_max=random.choice([0, 500, 5_000, 50_000]),
        turn_us_max=random.choice([0, 500, 20_000]),
        fault_share=0.02 if Trouble.FAULT in troubles else 0.0,
        fetch_error_share=0.2 if Trouble.FETCH in troubles else 0.0,
    )


def _behind(random: Random, clients: Sequence[str]) -> tuple[tuple[int, int, str], ...]:
    found: list[tuple[int, int, str]] = []
    for client in clients:
        if random.random() < 0.3:
            at_us = random.randrange(2 * SPREAD_US)
            found.append((at_us, at_us + random.choice([1, 10_000, STALL_US // 2]), client))
    return tuple(found)


def _with_stop_text(random: Random, arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    share = random.choice([0.0, 0.0, 0.5])
    for arrival in arrivals:
        has_stop_text = random.random() < share
        script = msgspec.structs.replace(arrival.script, has_stop_text=has_stop_text)
        yield msgspec.structs.replace(arrival, script=script)


def _layout(random: Random, is_alike: bool) -> Layout:
    same_page = random.choice([1, 2, 3, 4] if is_alike else [1, 2, 3, 4, 8, 16])
    is_same = is_alike or random.random() < 0.6
    reaches: list[tuple[str, Reach]] = [("full", All())]
    kind = random.random()
    if kind < 0.8:
        window = random.choice([1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24])
        reaches.append(("window", Window(Tokens(window))))
    if kind > 0.65:
        reaches.append(
            ("tail", Tail(Tokens(random.choice([1, 2, 3, 4, 7])), random.choice([0, 1])))
        )
    if kind > 0.95:
        reaches.append(("window2", Window(Tokens(random.randint(1, 12)))))
    groups = tuple(
        Group(
            name,
            reach,
            Tokens(same_page if is_same else random.randint(1, 16)),
            (TensorSpec("k", 0, (1,), "float32"),),
        )
        for name, reach in reaches
    )
    has_window = any(group.is_window for group in groups)
    layout = Layout(groups, random.random() < 0.6 if has_window else None)
    layout.check()
    return layout


def _workers(
    random: Random, layout: Layout, largest: Lengths, troubles: tuple[Trouble, ...]
) -> tuple[WorkerPlan, ...]:
    kind = random.random()
    roles = [Role.PREFILL, Role.DECODE]
    if kind < 0.15:
        roles = [Role.BOTH]
    elif kind < 0.3:
        roles = [Role.BOTH, Role.PREFILL, Role.DECODE]
    elif kind < 0.4:
        roles = [random.choice(list(Role)) for _ in range(random.randint(2, 5))]
    elif kind < 0.6:
        roles = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
    return tuple(
        _worker(random, WorkerId(f"{role.value}-{index}"), role, layout, largest, troubles)
        for index, role in enumerate(roles)
    )


def _worker(
    random: Random,
    name: WorkerId,
    role: Role,
    layout: Layout,
    largest: Lengths,
    troubles: tuple[Trouble, ...],
) -> WorkerPlan:
    legs = {
        Role.PREFILL: (Leg.SOURCE, Leg.WHOLE),
        Role.DECODE: (Leg.TARGET,),
        Role.BOTH: (Leg.WHOLE,),
    }[role]
    needs = [
        max(floors(layout, leg, largest)[i] for leg in legs) for i in range(len(layout.groups))
    ]
    # From too small for the largest request to room for several of them.
    factor = random.choice([0.6, 1.0, 1.0, 1.0, 1.5, 1.5, 3.0, 3.0])
    counts = [max(1, round(need * factor)) for need in needs]
    if random.random() < 0.5:
        counts = [count + random.randint(0, 4) for count in counts]
    slow = random.choice([1, 1, 1, 10])
    dies = Trouble.LOSS in troubles and random.random() < 0.4
    stalls = Trouble.STALL in troubles and random.random() < 0.4
    return WorkerPlan(
        worker=name,
        role=role,
        page_counts=tuple(counts),
        row_count=random.choice([1, 2, 4, 16]),
        steps_max=random.choice([1, 1, 2, 5]),
        depth=random.choice([1, 1, 2]),
        is_cautious=random.random() < 0.3,
        launch_us=random.choice([200, 2_000, 10_000]) * slow,
        pull_us=random.choice([100, 5_000, 40_000]),
        skip_share=random.choice([0.0, 0.0, 0.3]),
        dies_at_us=random.randrange(2 * SPREAD_US) if dies else None,
        returns_after_us=random.choice([None, 10, 100_000, 1_000_000]),
        stalls_at_us=random.randrange(2 * SPREAD_US) if stalls else None,
        stalls_for_us=random.choice([STALL_US // 2, 2 * STALL_US, 4 * STALL_US]),
    )


def _tighten(
    random: Random, worker: WorkerPlan, layout: Layout, largest: Lengths
) -> WorkerPlan:
    """The worker with rows for several requests, and pages for the growth of hardly one."""
    leg, factor = {
        Role.PREFILL: (Leg.SOURCE, 3),
        Role.DECODE: (Leg.TARGET, 1),
        Role.BOTH: (Leg.WHOLE, 1),
    }[worker.role]
    counts = [
        need * factor + random.randint(0, 2) if isinstance(group.reach, All) else need * 4
        for group, need in zip(layout.groups, floors(layout, leg, largest), strict=True)
    ]
    return msgspec.structs.replace(
        worker, page_counts=tuple(counts), row_count=random.choice([2, 4, 16])
    )


def _arrivals(
    random: Random,
    prompt_max: int,
    output_max: int,
    troubles: tuple[Trouble, ...],
    is_tight: bool,
) -> tuple[tuple[Arrival, ...], list[str]]:
    clients = [f"client-{index}" for index in range(random.randint(1, 3))]
    count = random.choice([1, 4, 12, 25])
    spread = random.choice([1, SPREAD_US // 10, SPREAD_US])
    if is_tight:
        count, spread = random.choice([4, 12, 25]), 1_000
    # A second wave comes when workers that stalled or died may be back.
    second_share = random.choice([0.0, 0.0, 0.3])
    second_at_us = random.choice([3 * SPREAD_US, STALL_US, 6 * STALL_US])
    arrivals: list[Arrival] = []
    for number in range(count):
        at_us = random.randrange(spread)
        if random.random() < second_share:
            at_us += second_at_us
        cancel_after_us, cancel_in = None, None
        if Trouble.CANCEL in troubles and random.random() < 0.5:
            cancel_after_us = random.randrange(random.choice([1, 1_000, 20_000, SPREAD_US]))
            cancel_in = random.choice([None, *CANCEL_PHASES])
        arrivals.append(
            Arrival(
                at_us=at_us,
                client=random.choice(clients),
                script=_script(random, number, prompt_max, output_max, troubles),
                cancel_after_us=cancel_after_us,
                cancel_in=cancel_in,
            )
        )
    return tuple(arrivals), clients


def _shared(
    random: Random, arrivals: Sequence[Arrival], prompt_max: int, share: float
) -> Iterator[Arrival]:
    """The same arrivals, many of which begin alike, as turns of conversations do."""
    family_count = random.choice([1, 2, 5])
    for arrival in arrivals:
        script = arrival.script
        if random.random() < share:
            script = msgspec.structs.replace(
                script,
                family=random.randrange(family_count),
                shared_tokens=random.randint(0, round(prompt_max * 1.1)),
            )
        yield msgspec.structs.replace(arrival, script=script)


def _with_tenants(
    random: Random, arrivals: Sequence[Arrival]
) -> tuple[tuple[Arrival, ...], dict[str, float]]:
    """The same arrivals, sent by tenants of which some send more than others, with weights."""
    tenants = ["", "a", "b", "c"][: random.choice([1, 2, 2, 3, 4])]
    busy = random.choice([1, 1, 10])  # How much more the first of them sends.
    weights = {
        tenant: random.choice([0.5, 2.0, 3.0]) for tenant in tenants if random.random() < 0.4
    }
    drawn = random.choices(tenants, [busy] + [1] * (len(tenants) - 1), k=len(arrivals))
    return tuple(
        msgspec.structs.replace(
            arrival, script=msgspec.structs.replace(arrival.script, tenant=tenant)
        )
        for arrival, tenant in zip(arrivals, drawn, strict=True)
    ), weights


def _with_deadlines(random: Random, arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    """The same arrivals, some of which bring a short timeout in all."""
    for arrival in arrivals:
        timeout_ms = random.choice([None] * 9 + [5, 50, 500])
        script = msgspec.structs.replace(arrival.script, total_timeout_ms=timeout_ms)
        yield msgspec.structs.replace(arrival, script=script)


def _script(
    random: Random, number: int, prompt_max: int, output_max: int, troubles: tuple[Trouble, ...]
) -> Script:
    has_timeout = Trouble.TIMEOUT in troubles and random.random() < 0.5
    return Script(
        number=number,
        prompt_tokens=random.randint(1, round(prompt_max * 1.1)),
        max_tokens=None if random.random() < 0.15 else random.randint(1, output_max),
        ends_at=random.randint(0, output_max) if random.random() < 0.3 else None,
        ends_with=random.choice([EndReason.END_TOKEN, EndReason.STOP_ID]),
        priority=random.choice([0, 0, 0, 1, 5, -3]),
        timeout_ms=random.choice([1, 20, 300]) if has_timeout else None,
    )
