"""Tenants with backlogs on a whole fleet in virtual time: who begins when, who was given what.

Nothing goes wrong here. A prefill and a decode worker, whose pools are large enough for all of
their rows; requests of all sizes from `PROMPT` and `OUTPUT`.
"""

from collections.abc import Mapping, Sequence
from random import Random

import msgspec

from simulation.scenario import Arrival, Scenario, WorkerPlan
from simulation.scripts import Script
from simulation.shares import TOKEN_COST
from simulation.simulator import Simulator
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Role, WorkerId
from tidegate.kvcache.layout import All, Group, Layout, TensorSpec, Tokens
from tidegate.scheduler.commands import Record
from tidegate.scheduler.settings import CoreSettings

LAYOUT = Layout(
    (Group("full", All(), Tokens(4), (TensorSpec("k", 0, (1,), "float32"),)),), None
)
ROWS = 4
LAUNCH_US_MAX = 10_000
PROMPT = (10, 60)  # Tokens, shortest and longest.
OUTPUT = (5, 30)
COST_MAX = PROMPT[1] + TOKEN_COST * OUTPUT[1]  # What a request may be charged.


class Send(msgspec.Struct, frozen=True):
    """One tenant sends `count` requests at `at_us`."""

    tenant: str
    count: int
    at_us: int = 0


class Begun(msgspec.Struct, frozen=True):
    """A request begins. `served` is what each tenant had been given just before, by charges."""

    at_us: int
    tenant: str
    served: Mapping[str, int]


class TenantRun:
    """One run; `begun` has the requests in the order in which they begin.

    With `are_apart` false the scheduler is not told who sends: all requests belong to one
    tenant, and so are served first come, first served.
    """

    def __init__(
        self,
        sends: Sequence[Send],
        seed: int,
        weights: Mapping[str, float] | None = None,
        *,
        are_apart: bool = True,
    ) -> None:
        self.begun: list[Begun] = []
        self._has_begun: set[str] = set()  # Asked for members only.
        arrivals = _arrivals(sends, seed, are_apart)
        self._tenants = {one.script.request_id: one.client for one in arrivals}
        scenario = Scenario(
            seed=seed,
            troubles=(),
            layout=LAYOUT,
            settings=CoreSettings(
                chunk_tokens=Tokens(64),
                handoff_waiting_count_max=1,
                tenant_weights=dict(weights or {}),
                bypass_count_max=0,
            ),
            workers=(_worker("prefill", Role.PREFILL, 2), _worker("decode", Role.DECODE, ROWS)),
            arrivals=arrivals,
            clients_gone=(),
            clients_behind=(),
            delay_us_max=500,
            turn_us_max=500,
            fault_share=0.0,
            fetch_error_share=0.0,
        )
        self._simulator = Simulator(scenario, trace=self._note, checks=False)
        self._simulator.run()

    def bound(self, one: str, other: str) -> float:
        """How far two tenants may differ, by weight, over a time in which both wait."""
        accounts = self._simulator.desk.shares.accounts
        return float(2 * sum(accounts[0, tenant].begun_cost_max for tenant in (one, other)))

    def places(self, tenant: str) -> list[int]:
        """Where in the order of beginning the tenant's requests are."""
        return [index for index, one in enumerate(self.begun) if one.tenant == tenant]

    def served(self, first: int, last: int) -> dict[str, int]:
        """What each tenant was given between two requests' beginning."""
        before, after = self.begun[first].served, self.begun[last].served
        return {tenant: after[tenant] - before[tenant] for tenant in after}

    def difference_max(self, one: str, other: str, last: int) -> int:
        """The greatest difference of service over any time until the one at `last` begins."""
        gaps = [begun.served[one] - begun.served[other] for begun in self.begun[: last + 1]]
        return max(gaps) - min(gaps)

    def _note(self, now_us: int, item: object) -> None:
        if isinstance(item, Record) and item.event is LogEvent.REQUEST_ADMITTED:
            assert item.request_id is not None
            self.begun.append(Begun(now_us, self._tenants[item.request_id], self._served()))
            self._has_begun.add(item.request_id)

    def _served(self) -> dict[str, int]:
        served = dict.fromkeys(self._tenants.values(), 0)
        for name, stream in self._simulator.desk.judge.streams.items():
            if name in self._has_begun:
                served[self._tenants[stream.script.request_id]] += (
                    stream.script.prompt_tokens + TOKEN_COST * len(stream.tokens)
                )
        return served


def _worker(name: str, role: Role, rows: int) -> WorkerPlan:
    return WorkerPlan(
        worker=WorkerId(name),
        role=role,
        page_counts=(400,),
        row_count=rows,
        steps_max=1,
        depth=1,
        is_cautious=False,
        launch_us=LAUNCH_US_MAX,
        pull_us=1000,
        skip_share=0.0,
    )


def _arrivals(sends: Sequence[Send], seed: int, are_apart: bool) -> tuple[Arrival, ...]:
    """In the order of `at_us`; tenants that send at one time take turns, by their counts."""
    random = Random(seed)
    keys = [
        (send.at_us, (index + 0.5) / send.count, send.tenant)
        for send in sends
        for index in range(send.count)
    ]
    return tuple(
        Arrival(
            at_us,
            tenant,
            Script(
                number,
                random.randint(*PROMPT),
                random.randint(*OUTPUT),
                tenant=tenant if are_apart else "",
            ),
        )
        for number, (at_us, _, tenant) in enumerate(sorted(keys))
    )
