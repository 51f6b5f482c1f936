"""Several times more requests than can be served: each of them ends, with a reason if early."""

import pytest

from simulation.__main__ import run_seed
from simulation.instant import InstantFleet
from simulation.known_layouts import layout_of
from simulation.liveness import AT_RANDOM, Liveness
from simulation.memory import SimulationError
from simulation.outcome import Outcome, add
from simulation.overload import LOAD_SEED_MIN, draw_any
from simulation.simulator import Simulator
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Role
from tidegate.kvcache.layout import All
from tidegate.scheduler.commands import Record
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings

SLICES = [range(LOAD_SEED_MIN + first, LOAD_SEED_MIN + first + 8) for first in (0, 8, 16)]


@pytest.mark.parametrize("seeds", SLICES, ids=[f"+{s.start % 1000}" for s in SLICES])
def test_each_request_is_complete_or_has_met_a_deadline_or_a_trouble(seeds: range) -> None:
    total = Outcome()
    for seed in seeds:
        add(total, run_seed(seed))
    assert total.submitted > 40 * len(seeds)
    assert total.complete > 5 * len(seeds)
    assert total.preemption_count > 10 and total.queue_timeout_count > 10


def test_without_troubles_only_a_full_queue_and_deadlines_leave_requests_incomplete() -> None:
    total = Outcome()
    for seed in range(LOAD_SEED_MIN + 1003, LOAD_SEED_MIN + 1010):
        add(total, Simulator(draw_any(seed, troubles=())).run())
    assert total.queue_timeout_count == total.ended_early > 10
    assert total.complete > 100 and total.restart_count == 0


def test_who_gives_way_again_before_anybody_has_gone_on_is_noticed() -> None:
    layout = layout_of((("full", All()),), (4,), flag=True)
    fleet = InstantFleet(layout, [(Role.BOTH, (40,))], CoreSettings())
    liveness = Liveness()
    said: list[str] = []

    def look() -> None:
        """Tell of the second of two rows that decode that it has given way twice."""
        core = fleet.desk.core.fleet
        if said or [r.phase for r in core.requests.values()] != [Phase.DECODING] * 2:
            return
        first, second = core.requests.values()
        liveness.admitted(first)
        liveness.admitted(second)
        for pool in (AT_RANDOM, "full", AT_RANDOM, "full"):
            record = Record(
                LogEvent.REQUEST_PREEMPTED,
                second.request_id,
                {"by": first.request_id, "worker": "both-0", "pool": pool},
            )
            try:
                liveness.preempted(record, core, fleet.desk.judge.streams)
                said.append("")
            except SimulationError as error:
                said.append(str(error))

    fleet.after_report = look
    for _ in range(2):
        fleet.submit(4, 8)
    fleet.settle()
    assert said[:3] == [""] * 3
    assert said[3].startswith("it gives way again, and nobody has gone on")
