"""The core through any history that Hypothesis can think of, with fake workers, step by step.

Unlike in the simulator there is no time between messages but what the steps say: each message
waits on its link until a rule takes it. Afterwards everything is brought to its end.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simulation.desk import Desk
from simulation.fake_worker import FakeWorker, PoolKey
from simulation.memory import Memory
from simulation.scripts import Script
from tidegate.ipc.protocol import EndReason, Fault, Incarnation, Plan, Report, Role, WorkerId
from tidegate.kvcache.layout import All, Group, Layout, TensorSpec, Tokens, Window
from tidegate.scheduler.commands import FinishRequest
from tidegate.scheduler.settings import CoreSettings

SPEC = TensorSpec("k", 0, (1,), "float32")
STALL_US = 1000
ROUND_COUNT_MAX = 2000
INDEX = st.integers(0, 30)
OUTPUT = st.one_of(st.none(), st.integers(1, 8))
RARELY = st.integers(0, 7).map(lambda number: number == 7)


class Link:
    """A worker and its two links."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.down: deque[Plan] = deque()
        self.up: deque[Report | Fault] = deque()
        self.told = 0  # The last plan that was reported to be completed.

    def send(self, report: Report) -> None:
        self.up.extend(self.worker.faults)
        self.worker.faults.clear()
        self.up.append(report)
        self.told = report.completed


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        page_tokens=st.integers(1, 4),
        window=st.one_of(st.none(), st.integers(1, 7)),
        flag=st.booleans(),
        roles=st.sampled_from(
            [
                (Role.PREFILL, Role.DECODE),
                (Role.PREFILL, Role.DECODE),
                (Role.BOTH,),
                (Role.BOTH, Role.PREFILL, Role.DECODE),
                (Role.PREFILL, Role.DECODE, Role.DECODE),
            ]
        ),
        counts=st.lists(
            st.tuples(st.integers(3, 14), st.integers(2, 10)), min_size=3, max_size=3
        ),
        chunk=st.one_of(st.none(), st.integers(1, 5)),
        mixed_chunk=st.one_of(st.none(), st.integers(1, 3)),
        chunks_in_flight=st.integers(1, 3),
        ahead=st.integers(1, 5),
        ahead_times=st.sampled_from([1, 4]),
        rows=st.integers(1, 3),
        depth=st.integers(1, 2),
    )
    def begin(
        self,
        page_tokens: int,
        window: int | None,
        flag: bool,
        roles: tuple[Role, ...],
        counts: list[tuple[int, int]],
        chunk: int | None,
        mixed_chunk: int | None,
        chunks_in_flight: int,
        ahead: int,
        ahead_times: int,
        rows: int,
        depth: int,
    ) -> None:
        groups = [Group("full", All(), Tokens(page_tokens), (SPEC,))]
        if window is not None:
            reach = Window(Tokens(window))
            groups.append(Group("window", reach, Tokens(page_tokens), (SPEC,)))
        self.layout = Layout(tuple(groups), None if window is None else flag)
        self.rows, self.depth = rows, depth
        self.scripts: dict[int, Script] = {}
        self.desk = Desk(
            CoreSettings(
                chunk_tokens=None if chunk is None else Tokens(chunk),
                mixed_chunk_tokens=None if mixed_chunk is None else Tokens(mixed_chunk),
                chunks_in_flight=chunks_in_flight,
                ahead_tokens=Tokens(ahead),
                ahead_tokens_max=Tokens(ahead * ahead_times),
                default_max_tokens=6,
                waiting_count_max=6,
                handoff_waiting_count_max=2,
                queue_timeout_us=20 * STALL_US,
                stall_timeout_us=STALL_US,
                poison_freed_pages=True,
            ),
            self.scripts,
        )
        self.now_us = 0
        self.memories: dict[PoolKey, Memory] = {}
        self.lives = 0
        self.links: dict[WorkerId, Link] = {}
        self.specs = {
            WorkerId(f"{role.value}-{index}"): (role, counts[index][: len(groups)])
            for index, role in enumerate(roles)
        }
        for name in self.specs:
            self.join(name)

    def join(self, name: WorkerId) -> None:
        role, counts = self.specs[name]
        self.lives += 1
        worker = FakeWorker(
            name,
            role,
            self.layout,
            counts,
            self.rows,
            Incarnation(self.lives),
            self.memories,
            self.scripts,
            steps_max=1 + self.lives % 3,
            depth=self.depth,
        )
        self.links[name] = Link(worker)
        self.desk.join(worker, self.now_us)

    def link(self, index: int) -> Link | None:
        links = list(self.links.values())
        return links[index % len(links)] if links else None

    # --- Clients ---

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 20), OUTPUT), min_size=1, max_size=3),
        ends_at=st.one_of(st.none(), st.integers(0, 7)),
        priority=st.integers(-1, 1),
        timeout_ms=st.sampled_from([None, None, 2]),
        client=st.sampled_from(["a", "b"]),
    )
    def submit(
        self,
        sizes: list[tuple[int, int | None]],
        ends_at: int | None,
        priority: int,
        timeout_ms: int | None,
        client: str,
    ) -> None:
        stop = EndReason.STOP_ID
        for prompt, output in sizes:
            number = len(self.scripts)
            script = Script(number, prompt, output, ends_at, stop, priority, timeout_ms)
            self.scripts[number] = script
            self.desk.submit(script, client, self.now_us)
        self.turn(0)

    @precondition(lambda self: bool(self.scripts))
    @rule(index=INDEX, kept=st.integers(0, 3))
    def cancel(self, index: int, kept: int) -> None:
        script = self.scripts[index % len(self.scripts)]
        self.desk.cancel(script.request_id, kept, self.now_us)

    @rule(client=st.sampled_from(["a", "b"]), really=RARELY)
    def client_gone(self, client: str, really: bool) -> None:
        if really:
            self.desk.client_gone(client, self.now_us)

    # --- The scheduler ---

    @rule(passes_us=st.sampled_from([0, 0, 0, 1, STALL_US // 3]))
    def turn(self, passes_us: int) -> None:
        self.now_us += passes_us
        for name, plan in self.desk.plan(self.now_us):
            self.links[name].down.append(plan)

    # --- Workers, message by message ---

    @rule(index=INDEX)
    def take_plan(self, index: int) -> None:
        link = self.link(index)
        if link is not None and link.down:
            link.worker.receive(link.down.popleft())

    @rule(index=INDEX)
    def launch(self, index: int) -> None:
        link = self.link(index)
        if link is not None:
            link.worker.apply_plans()
            link.worker.make_launch()

    @rule(index=INDEX, fails=RARELY)
    def land(self, index: int, fails: bool) -> None:
        link = self.link(index)
        if link is not None and link.worker.launches:
            link.send(link.worker.land(lambda _: fails))

    @rule(index=INDEX, fails=RARELY)
    def land_pull(self, index: int, fails: bool) -> None:
        link = self.link(index)
        if link is not None and link.worker.pulls:
            pull = next(iter(link.worker.pulls.values()))
            link.send(link.worker.land_pull(pull, "it failed" if fails else ""))

    @rule(index=INDEX)
    def sign_of_life(self, index: int) -> None:
        link = self.link(index)
        if link is not None:
            link.send(link.worker.report())

    @rule(index=INDEX)
    def take_answer(self, index: int) -> None:
        link = self.link(index)
        if link is None or not link.up:
            return
        message = link.up.popleft()
        if isinstance(message, Report):
            self.desk.report(link.worker.worker, message, self.now_us)
        else:
            self.desk.fault(link.worker.worker, message, self.now_us)

    @rule(index=INDEX, really=RARELY, returns=st.booleans())
    def lose(self, index: int, really: bool, returns: bool) -> None:
        link = self.link(index)
        if link is None or not really:
            return
        name = link.worker.worker
        del self.links[name]
        self.desk.lose(name, "it was killed", self.now_us)
        if returns:
            self.join(name)

    # --- Workers, several steps in one, so that requests get far ---

    @rule(index=INDEX)
    def work(self, index: int) -> None:
        """One thing of each kind, whose answers stay on the link."""
        self.take_plan(index)
        self.launch(index)
        self.land_pull(index, fails=False)
        self.land(index, fails=False)

    @rule(index=INDEX)
    def take_answers(self, index: int) -> None:
        link = self.link(index)
        while link is not None and link.up:
            self.take_answer(index)
        self.turn(0)

    @rule(count=st.integers(1, 4))
    def everybody_works(self, count: int) -> None:
        for _ in range(count):
            for index in range(len(self.links)):
                self.work(index)
                self.take_answers(index)

    # --- What must hold ---

    @invariant()
    def the_state_is_sound(self) -> None:
        if hasattr(self, "desk"):
            self.desk.core.fleet.check()

    def teardown(self) -> None:
        """All links are emptied and all launches landed, until nothing moves any more."""
        if not hasattr(self, "desk"):
            return
        for _ in range(ROUND_COUNT_MAX):
            self.turn(0)
            if not any(self._run(link) for link in tuple(self.links.values())):
                break
        core = self.desk.core
        assert core.is_idle
        for worker in core.fleet.workers.values():
            assert len(worker.rows_free) == worker.row_count
            for pool in worker.books.pools:
                assert pool.free_count + pool.idle_count == pool.page_count
        for stream in self.desk.judge.streams.values():
            assert stream.answer is not None
            if isinstance(stream.answer, FinishRequest) and not stream.answer.text:
                assert stream.is_complete or stream.is_cancelled

    def _run(self, link: Link) -> bool:
        """Let one worker do all that it can; says whether it did anything."""
        worker = link.worker
        while link.down:
            worker.receive(link.down.popleft())
        worker.apply_plans()
        for pull in tuple(worker.pulls.values()):
            link.send(worker.land_pull(pull))
        while worker.make_launch() is not None or worker.launches:
            link.send(worker.land())
        if worker.completed > link.told:
            link.send(worker.report())
        has_answers = bool(link.up)
        while link.up:
            message = link.up.popleft()
            if isinstance(message, Report):
                self.desk.report(worker.worker, message, self.now_us)
            else:
                self.desk.fault(worker.worker, message, self.now_us)
        return has_answers


CoreMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=60, deadline=None, derandomize=True
)
TestCore = CoreMachine.TestCase
