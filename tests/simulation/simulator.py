"""A whole fleet in virtual time around the real core.

1. *Trouble*: requests arrive, and all that the scenario draws goes wrong.
2. *Calm*: nothing goes wrong any more. Everything that was accepted must end, every page and
   row come free, and each request have had its tokens once, in order, and one last answer.

All is drawn from the scenario's seed: the same seed gives the same trace.
"""

import heapq
import re
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from simulation.desk import Desk
from simulation.fake_worker import FakeWorker, Launch, PoolKey, Pull
from simulation.judge import Stream
from simulation.liveness import preempt_at_random
from simulation.memory import Memory, SimulationError
from simulation.outcome import Outcome
from simulation.scenario import QUEUE_US, Arrival, Scenario, Trouble, WorkerPlan
from simulation.scripts import Script
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, Fault, Incarnation, Plan, Report, WorkerId
from tidegate.scheduler.commands import FinishRequest

EVENT_COUNT_MAX = 300_000
RESTART_US = 5_000_000  # Until a worker that was fenced is back.


class Life:
    """One life of a worker, with the links to and from it: first in, first out."""

    def __init__(self, plan: WorkerPlan, worker: FakeWorker) -> None:
        self.plan = plan
        self.worker = worker
        self.is_dead = False  # It does nothing more.
        self.is_lost = False  # The scheduler has been told; its messages are dropped.
        self.stalled_until_us = 0
        self.down_us = 0  # When the last message to it arrives.
        self.up_us = 0
        self.reported = 0  # The plan that its last report said to be completed.


class Simulator:
    """One run. `trace` is called with each event and command of the core, and the time."""

    def __init__(
        self,
        scenario: Scenario,
        trace: Callable[[int, object], None] | None = None,
        *,
        checks: bool = True,
        worker_class: type[FakeWorker] = FakeWorker,
    ) -> None:
        self.scenario = scenario
        self._worker_class = worker_class
        self.outcome = Outcome()
        self.now_us = 0
        self._random = Random(scenario.seed * 2 + 1)
        self._scripts: dict[int, Script] = {
            arrival.script.number: arrival.script for arrival in scenario.arrivals
        }
        self.desk = Desk(
            scenario.settings,
            self._scripts,
            None if trace is None else lambda item: trace(self.now_us, item),
            checks=checks,
        )
        self.desk.on_fence = self._fenced
        self._current: dict[WorkerId, Life] = {}
        self._lives: dict[WorkerId, Life] = {}  # Those that the scheduler knows.
        self._memories: dict[PoolKey, Memory] = {}
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._inbox: list[Callable[[], None]] = []
        self._turn_at_us: int | None = None
        self._to_cancel: list[Arrival] = []
        self._incarnation = 0
        self._sequence = 0

    def run(self) -> Outcome:
        """Run to the end. Raises `SimulationError`, or an assertion of the core's own."""
        scenario = self.scenario
        for plan in scenario.workers:
            self._born(plan)
            if plan.dies_at_us is not None:
                self._at(plan.dies_at_us, partial(self._die, plan))
            if plan.stalls_at_us is not None:
                self._at(plan.stalls_at_us, partial(self._stall, plan))
        for arrival in scenario.arrivals:
            self._at(1 + arrival.at_us, partial(self._arrive, arrival))
        for at_us, until_us, client in scenario.clients_behind:
            self._at(at_us, partial(self._reader, client, is_behind=True))
            self._at(until_us, partial(self._reader, client, is_behind=False))
        for at_us, client in scenario.clients_gone:
            self._at(at_us, partial(self._client_gone, client))
        while self._events:
            self.outcome.event_count += 1
            if self.outcome.event_count > EVENT_COUNT_MAX:
                raise SimulationError("the run does not come to an end")
            self.now_us, _, happen = heapq.heappop(self._events)
            happen()
        self._check_end()
        return self.outcome

    # --- Time ---

    def _at(self, time_us: int, happen: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_us, self._sequence, happen))

    def _delay(self) -> int:
        """Of a message: mostly short, sometimes long."""
        longest = self.scenario.delay_us_max
        if longest and self._random.random() < 0.9:
            longest = max(1, longest // 20)
        return self._random.randint(0, longest)

    # --- The scheduler ---

    def _tell(self, happen: Callable[[], None]) -> None:
        """Something arrives at the scheduler, and joins its next turn."""
        self._inbox.append(happen)
        self._turn_by(self.now_us + self._random.randint(0, self.scenario.turn_us_max))

    def _turn_by(self, time_us: int) -> None:
        if self._turn_at_us is None or time_us < self._turn_at_us:
            self._turn_at_us = time_us
            self._at(time_us, partial(self._turn, time_us))

    def _turn(self, at_us: int) -> None:
        if self._turn_at_us != at_us:
            return  # A turn came before.
        self._turn_at_us = None
        inbox, self._inbox = self._inbox, []
        for happen in inbox:
            happen()
        share = self.scenario.preempt_share
        if share and self._random.random() < share:
            preempt_at_random(self.desk.core.fleet, self._random, self.now_us)
        for worker, plan in self.desk.plan(self.now_us):
            self._send_plan(self._lives[worker], plan)
        self._look_at_phases()
        wake_us = self.desk.core.wake_us
        if wake_us is not None:
            self._turn_by(wake_us)

    def _send_plan(self, life: Life, plan: Plan) -> None:
        life.down_us = max(life.down_us, self.now_us + self._delay())

        def arrive() -> None:
            life.worker.receive(plan)
            self._step(life)

        self._at(life.down_us, arrive)

    # --- Workers ---

    def _born(self, plan: WorkerPlan) -> None:
        self._incarnation += 1
        worker = self._worker_class(
            plan.worker,
            plan.role,
            self.scenario.layout,
            plan.page_counts,
            plan.row_count,
            Incarnation(self._incarnation),
            self._memories,
            self._scripts,
            steps_max=plan.steps_max,
            depth=plan.depth,
            is_cautious=plan.is_cautious,
        )
        life = self._current[plan.worker] = Life(plan, worker)

        def join() -> None:
            self._lives[plan.worker] = life
            self.desk.join(worker, self.now_us)

        self._tell(join)

    def _die(self, plan: WorkerPlan) -> None:
        life = self._current[plan.worker]
        if life.is_dead:
            return
        life.is_dead = True

        def lose() -> None:
            if life.is_lost:
                return  # It was fenced before anybody heard of its death.
            life.is_lost = True
            self.desk.lose(plan.worker, "it was killed", self.now_us)
            if plan.returns_after_us is not None:
                self._at(self.now_us + plan.returns_after_us, partial(self._born, plan))

        # What it sent before may still come, or be lost.
        self._at(self.now_us + self._delay(), partial(self._tell, lose))

    def _stall(self, plan: WorkerPlan) -> None:
        life = self._current[plan.worker]
        life.stalled_until_us = self.now_us + plan.stalls_for_us
        self._at(life.stalled_until_us, partial(self._step, life))

    def _fenced(self, name: WorkerId) -> None:
        """The scheduler has closed it for good; it is killed, and started again."""
        life = self._lives[name]
        life.is_dead = life.is_lost = True
        self.outcome.fence_count += 1
        self._at(self.now_us + RESTART_US, partial(self._born, life.plan))

    def _step(self, life: Life) -> None:
        """One turn of the worker's loop: plans, pulls, and a launch if there is room for it."""
        if life.is_dead or self.now_us < life.stalled_until_us:
            return
        worker, plan = life.worker, life.plan
        for pull in worker.apply_plans():
            duration = self._random.randint(1, plan.pull_us)
            self._at(self.now_us + duration, partial(self._land_pull, life, pull))
        skipped = plan.skip_share
        launch = worker.make_launch(lambda _: self._random.random() >= skipped)
        if launch is not None:
            duration = self._random.randint(1, plan.launch_us)
            self._at(self.now_us + duration, partial(self._land, life, launch, duration))
            self._at(self.now_us, partial(self._step, life))  # There may be room for another.
        elif skipped:
            self._at(self.now_us + plan.launch_us, partial(self._retry, life))
        if worker.completed > life.reported and not worker.launches:
            self._send(life, worker.report())

    def _retry(self, life: Life) -> None:
        """Rows that sat out by chance, and nothing else is under way to bring them up again."""
        if life.worker.is_ready and not life.worker.launches:
            self._step(life)

    def _land(self, life: Life, launch: Launch, busy_us: int) -> None:
        if life.is_dead:
            return
        if self.now_us < life.stalled_until_us:
            self._at(life.stalled_until_us, partial(self._land, life, launch, busy_us))
            return
        share = self.scenario.fault_share
        report = life.worker.land(lambda _: self._random.random() < share)
        for fault in life.worker.faults:
            self._send(life, fault)
        life.worker.faults.clear()
        self._send(life, msgspec.structs.replace(report, busy_us=busy_us))
        self._step(life)

    def _land_pull(self, life: Life, pull: Pull) -> None:
        if life.is_dead:
            return
        if self.now_us < life.stalled_until_us:
            self._at(life.stalled_until_us, partial(self._land_pull, life, pull))
            return
        fails = self._random.random() < self.scenario.fetch_error_share
        report = life.worker.land_pull(pull, "the copy failed" if fails else "")
        self._send(life, report)
        self._step(life)

    def _send(self, life: Life, message: Report | Fault) -> None:
        life.up_us = max(life.up_us, self.now_us + self._delay())
        name = life.plan.worker
        if isinstance(message, Report):
            life.reported = message.completed

        def take() -> None:
            if life.is_lost:
                return
            if isinstance(message, Report):
                self.desk.report(name, message, self.now_us)
            else:
                self.desk.fault(name, message, self.now_us)

        self._at(life.up_us, partial(self._tell, take))

    # --- Clients ---

    def _arrive(self, arrival: Arrival) -> None:
        script = arrival.script
        self.outcome.submitted += 1
        self._tell(lambda: self.desk.submit(script, arrival.client, self.now_us))
        if arrival.cancel_in is not None:
            self._to_cancel.append(arrival)
        elif arrival.cancel_after_us is not None:
            self._cancel_soon(arrival)

    def _cancel_soon(self, arrival: Arrival) -> None:
        at_us = self.now_us + (arrival.cancel_after_us or 0)
        self._at(at_us, lambda: self._tell(lambda: self._cancel(arrival.script)))

    def _look_at_phases(self) -> None:
        """Cancels follow that were to come when a request has reached some phase."""
        for arrival in tuple(self._to_cancel):
            request = self.desk.core.fleet.requests.get(arrival.script.request_id)
            if request is not None and request.phase is arrival.cancel_in:
                self._to_cancel.remove(arrival)
                self._cancel_soon(arrival)

    def _cancel(self, script: Script) -> None:
        request = self.desk.core.fleet.requests.get(script.request_id)
        if request is not None:
            counts = self.outcome.cancelled_in
            counts[request.phase] = counts.get(request.phase, 0) + 1
        kept = self._random.randint(0, 3)
        self.desk.cancel(script.request_id, kept, self.now_us)

    def _reader(self, client: str, *, is_behind: bool) -> None:
        self._tell(lambda: self.desk.reader(client, self.now_us, is_behind=is_behind))

    def _client_gone(self, client: str) -> None:
        self._tell(lambda: self.desk.client_gone(client, self.now_us))

    # --- The end ---

    def _check_end(self) -> None:
        core = self.desk.core
        if not core.is_idle:
            raise SimulationError("the run is over, and the core is not idle")
        records = self.desk.records
        if records.get(LogEvent.REQUEST_FINISHED) != records.get(LogEvent.REQUEST_ACCEPTED):
            raise SimulationError("the log does not tell the end of each request once")
        for worker in core.fleet.workers.values():
            for group, pool in zip(worker.layout.groups, worker.books.pools, strict=True):
                if pool.free_count + pool.idle_count != pool.page_count:
                    raise SimulationError(f"{worker.worker_id} leaks {group.name} pages")
            worker.books.evict_all()
            if not all(pool.free_count == pool.page_count for pool in worker.books.pools):
                raise SimulationError(f"{worker.worker_id} keeps pages that it cannot evict")
            if len(worker.rows_free) != worker.row_count:
                raise SimulationError(f"{worker.worker_id} leaks rows")
            if worker.is_suspect:
                raise SimulationError(f"{worker.worker_id} has answered, and stays suspect")
        outcome = self.outcome
        outcome.stale_answer_count = core.fleet.stale_count
        outcome.given_back_count = self.desk.given_back_count
        outcome.early_count = self.desk.records.get(LogEvent.EARLY_HANDOFF_STARTED, 0)
        outcome.early_lost_count = self.desk.records.get(LogEvent.EARLY_HANDOFF_ENDED, 0)
        outcome.early_pull_count = self.desk.pulls.early_count
        outcome.preemption_count = self.desk.records.get(LogEvent.REQUEST_PREEMPTED, 0)
        outcome.pass_count = self.desk.shares.pass_count
        outcome.restart_count = self.desk.restart_count
        outcome.cached_tokens = self.desk.cached_tokens
        for stream in self.desk.judge.streams.values():
            if stream.answer is None:
                raise SimulationError(f"{stream.script.request_id} has no last answer")
            outcome.token_count += len(stream.tokens)
            if not isinstance(stream.answer, FinishRequest):
                outcome.refused += 1
            elif stream.is_complete:
                outcome.complete += 1
            else:
                outcome.ended_early += 1
                self._check_early_end(stream, stream.answer)

    def _check_early_end(self, stream: Stream, answer: FinishRequest) -> None:
        """A request ends before its time only for a cause that the scenario has drawn."""
        troubles = set(self.scenario.troubles)
        workers = self.scenario.workers
        dying = [w.worker for w in workers if w.dies_at_us is not None]
        stalling = [w.worker for w in workers if w.stalls_at_us is not None]
        named = re.findall(
            r"worker (\S+) (?:is gone|gave no answer|brought nothing)", answer.text
        )
        match answer.reason:
            case EndReason.CANCELLED:
                is_right = stream.is_cancelled
            case EndReason.TIMEOUT if named:
                is_right = named[0] in stalling
            case EndReason.TIMEOUT if answer.text.startswith("it waited"):
                is_right = self.scenario.settings.queue_timeout_us < QUEUE_US
                self.outcome.queue_timeout_count += 1
            case EndReason.TIMEOUT:
                # The judge has compared the times.
                is_right = "its own timeout" in answer.text
            case EndReason.ERROR if named:
                is_right = named[0] in dying or named[0] in stalling
            case EndReason.ERROR if answer.text == "device: it failed":
                is_right = Trouble.FAULT in troubles
            case EndReason.ERROR if answer.text.endswith("failed: the copy failed"):
                is_right = Trouble.FETCH in troubles
            case EndReason.ERROR:
                is_homeless = "are gone or make no progress" in answer.text
                is_right = is_homeless and bool(dying or stalling)
            case _:
                is_right = False
        if not is_right:
            raise SimulationError(f"ended without a cause: {answer}")
