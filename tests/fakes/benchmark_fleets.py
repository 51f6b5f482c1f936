"""Small fleets for tests of benchmarks in virtual time: pages of 4 tokens, a window of 8."""

from collections.abc import Sequence

from cost_model import Costs
from doors import Policy
from no_law import NoLaw
from request_traces import TraceRequest
from tidegate.ipc.protocol import Role
from tidegate.kvcache.layout import All, Group, Layout, Pages, TensorSpec, Tokens, Window
from tidegate.scheduler.core import Core
from tidegate.scheduler.events import WorkerJoined
from tidegate.scheduler.settings import CoreSettings
from timed_worker import join_worker
from virtual_fleet import Run, VirtualFleet

TENSOR = TensorSpec("k", 0, (5,), "bfloat16")
LAYOUT = Layout(
    (
        Group("full", All(), Tokens(4), (TENSOR,)),
        Group("window", Window(Tokens(8)), Tokens(4), (TENSOR,)),
    ),
    True,
)
COSTS = Costs(100.0, 10.0, 0.0, 50.0, 1.0, 0.0, 2.0)
PATIENCE_US = 1_000_000
CHUNK_TOKENS = 16
AHEAD_TOKENS = 4


def workers(roles: Sequence[Role], full: int, window: int) -> list[WorkerJoined]:
    """Workers with so many pages in either pool, and eight rows."""
    pages = [Pages(full), Pages(window)]
    return [
        join_worker(f"{role.value}-{number}", role, number, LAYOUT, pages, 8, 4096)
        for number, role in enumerate(roles)
    ]


def core(*, early_handoff: bool = True) -> Core:
    return Core(
        CoreSettings(
            early_handoff=early_handoff,
            chunk_tokens=Tokens(CHUNK_TOKENS),
            ahead_tokens=Tokens(AHEAD_TOKENS),
            queue_timeout_us=PATIENCE_US,
            stall_timeout_us=PATIENCE_US,
        )
    )


def no_law() -> NoLaw:
    return NoLaw(chunk_tokens=CHUNK_TOKENS, ahead_tokens=AHEAD_TOKENS, patience_us=PATIENCE_US)


def run(
    policy: Policy,
    joined: Sequence[WorkerJoined],
    *requests: tuple[int, int, int],
    speed: float = 1.0,
    timeout_ms: int | None = None,
) -> Run:
    """Requests are their times in microseconds, and tokens of prompt and output."""
    trace = [TraceRequest(*request) for request in requests]
    fleet = VirtualFleet(policy, joined, COSTS, trace, speed=speed, timeout_ms=timeout_ms)
    return fleet.run()
