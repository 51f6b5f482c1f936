"""The fleets and policies that are compared on a trace, and one run of one of them."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from cost_model import Costs
from doors import Policy, WindowCapped
from no_law import NoLaw
from request_traces import TraceRequest, unit_hashes
from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.models.layouts import layout_for
from tidegate.engine.pools import pool_settings
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import Role, WorkerId
from tidegate.kvcache.layout import Layout, Pages, Tokens
from tidegate.kvcache.sizer import SizedPools, size_pools
from tidegate.kvcache.units import unit_tokens
from tidegate.scheduler.core import Core
from tidegate.scheduler.events import WorkerJoined
from tidegate.scheduler.run_ahead import LEAST_PARTS
from tidegate.scheduler.settings import CoreSettings
from timed_worker import join_worker
from virtual_fleet import Run, VirtualFleet

MODEL = "gemma3-270m"  # Whose costs are measured, and whose layout and sizes the pools have.
CONTEXT_TOKENS = 131_072  # Of the larger models of the family: the traces have long prompts.
DTYPE = "bfloat16"
UNBOUNDED = 10**12  # For queues: a trace's requests are to wait, and not to be sent away.

CAPPED = "window-capped"
LAWLESS = "full pool, no law"
OURS = "ours"
DEADLINES = "ours, with deadlines"
CACHED = "ours, with prefix cache"
DOORS = (CAPPED, LAWLESS, OURS)

FLEETS: Mapping[str, tuple[Role, ...]] = {
    "4 both": (Role.BOTH,) * 4,
    "1 P + 3 D": (Role.PREFILL, *(Role.DECODE,) * 3),
    "2 P + 2 D": (*(Role.PREFILL,) * 2, *(Role.DECODE,) * 2),
    "3 P + 1 D": (*(Role.PREFILL,) * 3, Role.DECODE),
}


class Setup(msgspec.Struct, frozen=True):
    """What all runs of a trace share. `costs` are those of the workers that are simulated."""

    layout: Layout
    sizes: Mapping[Role, SizedPools]
    costs: Costs
    row_count: int
    chunk_tokens: int
    ahead_tokens: int
    patience_us: int
    ttft_ms: float


def make_setup(
    costs: Costs, *, kv_memory: int, page_tokens: int, patience_ms: float, ttft_ms: float
) -> Setup:
    """Pools as `tidegate plan` gives them to workers with `kv_memory` bytes.

    Raises `SizeError` if not even one request fits.
    """
    config = msgspec.structs.replace(
        open_checkpoint(MODEL, needs_weights=False).config, context=CONTEXT_TOKENS
    )
    settings = {
        role: WorkerSettings(
            model=MODEL,
            role=role,
            name=WorkerId(role.value),
            endpoint="",
            dtype=DTYPE,
            kv_memory=kv_memory,
            page_tokens=page_tokens,
        )
        for role in Role
    }
    one = settings[Role.BOTH]
    assert one.chunk_tokens is not None
    layout = layout_for(config, page_tokens, DTYPE)
    return Setup(
        layout,
        {
            role: size_pools(layout, pool_settings(each, config, kv_memory))
            for role, each in settings.items()
        },
        costs,
        one.max_running,
        one.chunk_tokens,
        one.ahead_tokens,
        round(patience_ms * 1e3),
        ttft_ms,
    )


def join_fleet(setup: Setup, roles: Sequence[Role]) -> list[WorkerJoined]:
    return [
        join_worker(
            f"{role.value}-{number}",
            role,
            number,
            setup.layout,
            [Pages(count) for count in setup.sizes[role].page_counts],
            setup.row_count,
            CONTEXT_TOKENS,
        )
        for number, role in enumerate(roles)
    ]


def make_policy(setup: Setup, door: str) -> Policy:
    """A door of the names above. All wait as long and run as large chunks."""
    if door == LAWLESS:
        return NoLaw(
            chunk_tokens=setup.chunk_tokens,
            # As little as the core's rows take while pages are short.
            ahead_tokens=setup.ahead_tokens // LEAST_PARTS,
            patience_us=setup.patience_us,
        )
    core = Core(
        CoreSettings(
            chunk_tokens=Tokens(setup.chunk_tokens),
            ahead_tokens=Tokens(setup.ahead_tokens),
            waiting_count_max=UNBOUNDED,
            waiting_tokens_max=UNBOUNDED,
            queue_timeout_us=setup.patience_us,
            stall_timeout_us=setup.patience_us,
            prefix_cache=door == CACHED,
        )
    )
    return WindowCapped(core) if door == CAPPED else core


def run_fleet(
    setup: Setup,
    roles: Sequence[Role],
    door: str,
    requests: Sequence[TraceRequest],
    speed: float,
) -> Run:
    """One run. With deadlines, each client allows the limit on TTFT and no more."""
    fleet = VirtualFleet(
        make_policy(setup, door),
        join_fleet(setup, roles),
        setup.costs,
        requests,
        speed=speed,
        timeout_ms=math.ceil(setup.ttft_ms) if door == DEADLINES else None,
        unit_hashes=partial(unit_hashes, unit_tokens=unit_tokens(setup.layout))
        if door == CACHED
        else no_hashes,
    )
    return fleet.run()


def no_hashes(request: TraceRequest) -> tuple[bytes, ...]:
    return ()
