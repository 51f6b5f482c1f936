"""No requests take each other's pages for ever: what bounds how often one gives way.

A row gives way only when it, or a row of higher rank, starves; and whoever starves gets its
page before anything of lower rank comes back. So between two preemptions of a request, it or
one of higher rank has brought a token. A rank never changes and outputs have an end: a request
gives way no more often than it and those above it bring tokens, and once more.
"""

from collections.abc import Mapping
from random import Random

from simulation.judge import Stream
from simulation.memory import SimulationError
from tidegate.scheduler.commands import Record
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.growth import preempt
from tidegate.scheduler.state import Rank, Request

AT_RANDOM = "at random"  # In place of a pool: by no want of pages, but for the test.


class Liveness:
    """Follows ranks and preemptions of one run; raises `SimulationError`."""

    def __init__(self) -> None:
        self._ranks: dict[str, Rank] = {}
        self._tokens_before: dict[str, int] = {}  # At the request's last preemption.

    def admitted(self, request: Request) -> None:
        """It has its rank from the first time on."""
        self._ranks[request.request_id] = request.rank

    def preempted(self, record: Record, fleet: Fleet, streams: Mapping[str, Stream]) -> None:
        """Who gives way never has the highest rank there, nor a higher one than who starves."""
        if record.fields["pool"] == AT_RANDOM:
            return
        name = record.request_id
        assert name is not None
        # Its rank is kept here: who gives way may end in the same plan, if nobody can hold it.
        victim = self._ranks[name]
        (worker,) = (
            w for w in fleet.workers.values() if w.worker_id == record.fields["worker"]
        )
        if victim < self._ranks[str(record.fields["by"])]:
            raise SimulationError(f"the wrong request gives way: {record}")
        # Whoever is above it there is not preempted by the same plan, or not all of them are.
        if not any(seat.request.rank < victim for seat in worker.seats.values()):
            raise SimulationError(f"the highest rank gives way: {record}")
        tokens = sum(
            len(streams[other].tokens) for other, rank in self._ranks.items() if rank <= victim
        )
        if self._tokens_before.get(name) == tokens:
            raise SimulationError(f"it gives way again, and nobody has gone on: {record}")
        self._tokens_before[name] = tokens


def preempt_at_random(fleet: Fleet, random: Random, now_us: int) -> None:
    """Have some request give way that is not the first on its worker, if there is one."""
    seats = [
        seat
        for worker in fleet.healthy()
        for seat in sorted(worker.seats.values(), key=lambda s: s.request.rank)[1:]
        if seat.may_grow
    ]
    if seats:
        seat = random.choice(seats)
        preempt(fleet, seat, now_us, by=seat.request, pools=AT_RANDOM)
