"""A fleet that answers at once: for questions about outcomes, and not about time."""

from collections.abc import Callable, Sequence

from simulation.desk import Desk
from simulation.fake_worker import FakeWorker, PoolKey
from simulation.memory import Memory, SimulationError
from simulation.scripts import Script
from tidegate.ipc.protocol import Incarnation, Plan, Report, Role, WorkerId
from tidegate.kvcache.layout import Layout
from tidegate.scheduler.commands import FinishRequest, RefuseRequest
from tidegate.scheduler.settings import CoreSettings

ROUND_COUNT_MAX = 10_000


class InstantFleet:
    """Workers with pools of these sizes around a real core. Each call runs to quiet."""

    def __init__(
        self,
        layout: Layout,
        pools: Sequence[tuple[Role, Sequence[int]]],
        settings: CoreSettings,
        *,
        row_count: int = 4,
        steps_max: int = 1,
        trace: Callable[[object], None] | None = None,
        checks: bool = True,
    ) -> None:
        """`steps_max` is how many tokens of a row come in one answer, at most; `trace` is
        called with each event and command."""
        self.scripts: dict[int, Script] = {}
        self.desk = Desk(settings, self.scripts, trace, checks=checks)
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.after_report: Callable[[], None] = lambda: None  # Called after each answer.
        memories: dict[PoolKey, Memory] = {}
        for index, (role, page_counts) in enumerate(pools):
            worker = FakeWorker(
                WorkerId(f"{role.value}-{index}"),
                role,
                layout,
                page_counts,
                row_count,
                Incarnation(index + 1),
                memories,
                self.scripts,
                steps_max=steps_max,
            )
            self.workers[worker.worker] = worker
            self.desk.join(worker, 0)
        self.settle()

    def run(
        self, prompt_tokens: int, max_tokens: int | None, shared_tokens: int = 0
    ) -> FinishRequest | RefuseRequest:
        """Submit one request and run until nothing is left to do; returns its last answer.

        So many tokens its prompt has in common with that of every other that shares some.
        """
        script = self.submit(prompt_tokens, max_tokens, shared_tokens)
        self.settle()
        answer = self.desk.judge.streams[script.request_id].answer
        if answer is None or not self.desk.core.is_idle:
            raise SimulationError(f"{script} does not come to an end")
        return answer

    def submit(
        self, prompt_tokens: int, max_tokens: int | None, shared_tokens: int = 0
    ) -> Script:
        """It arrives; `settle` runs it."""
        script = Script(
            len(self.scripts), prompt_tokens, max_tokens, shared_tokens=shared_tokens
        )
        self.scripts[script.number] = script
        self.desk.submit(script, "client", 0)
        return script

    def lose(self, worker: WorkerId) -> None:
        """The worker is gone for good, with all that it was sent."""
        del self.workers[worker]
        self.desk.lose(worker, "it was killed", 0)

    def settle(self) -> None:
        for _ in range(ROUND_COUNT_MAX):
            plans = self.desk.plan(0)
            if not plans:
                return
            for worker, plan in plans:
                if worker not in self.workers:
                    continue
                for report in self._answers(self.workers[worker], plan):
                    self.desk.report(worker, report, 0)
                    self.after_report()
        raise SimulationError("the fleet does not come to rest")

    def _answers(self, worker: FakeWorker, plan: Plan) -> list[Report]:
        worker.receive(plan)
        reports = [worker.land_pull(pull) for pull in worker.apply_plans()]
        while worker.make_launch() is not None:
            reports.append(worker.land())
        return reports or [worker.report()]
