"""CPU a token of the scheduler's core and shell, in one process: no socket, no model.

One engine's report of each launch goes through the shell to one client. Times are those of
this thread's CPU. What the engine and the links use themselves is measured and left out.
"""

import os
import random
import time
from collections import deque
from statistics import median

import msgspec
import trio

from mock_engine import MockEngine
from tidegate.ipc.log import Log, configure
from tidegate.ipc.outbox import SendOutcome
from tidegate.ipc.protocol import (
    Plan,
    RequestId,
    Sampling,
    Submit,
    Welcome,
    decode_for_worker,
    encode,
    pack_ids,
)
from tidegate.kvcache.demand import Lengths
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.commands import Command
from tidegate.scheduler.core import Core
from tidegate.scheduler.events import Event
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.shell import Shell, ShellSettings

WARM_UP_TURN_COUNT = 100
SLICE_TURN_COUNT = 50  # The figure is the median of slices, as a machine has neighbours.


class Cost(msgspec.Struct, frozen=True):
    """Microseconds of CPU a token."""

    core_us: float
    shell_us: float


class Meter:
    """Nanoseconds of this thread's CPU in the core, and in the benchmark's own parts."""

    def __init__(self) -> None:
        self.core_ns = 0
        self.own_ns = 0


class TimedCore(Core):
    def __init__(self, settings: CoreSettings, meter: Meter) -> None:
        super().__init__(settings)
        self._meter = meter

    def apply(self, event: Event, now_us: int) -> None:
        begin = time.thread_time_ns()
        super().apply(event, now_us)
        self._meter.core_ns += time.thread_time_ns() - begin

    def plan(self, now_us: int) -> list[Command]:
        begin = time.thread_time_ns()
        commands = super().plan(now_us)
        self._meter.core_ns += time.thread_time_ns() - begin
        return commands


class EngineLink:
    """The shell's link to one engine, which answers when it is asked for frames."""

    def __init__(self, engine: MockEngine, meter: Meter, turn_count: int) -> None:
        self._engine = engine
        self._meter = meter
        self._turns_left = turn_count
        self._frames: deque[bytes] = deque([encode(engine.hello)])
        self._ready = trio.Event()
        self._ready.set()
        self.costs: list[Cost] = []
        self.is_over = trio.Event()
        self._slice_begin = (0, 0, 0)
        self._slice_tokens = 0
        self._turns_done = 0

    async def receive(self) -> list[tuple[bytes, bytes]]:
        while True:
            begin = time.thread_time_ns()
            frame = self._next_frame()
            self._meter.own_ns += time.thread_time_ns() - begin
            if frame is not None:
                await trio.lowlevel.checkpoint()
                return [(b"engine", frame)]
            self._ready = trio.Event()
            await self._ready.wait()

    def _next_frame(self) -> bytes | None:
        if self._frames:
            return self._frames.popleft()
        report = self._engine.launch()
        if report is None:
            return None
        if self._engine.decoding_count == self._engine.row_count:
            self._count(len(report.rows) // 4)
        return encode(report)

    def _count(self, tokens: int) -> None:
        """One more turn begins in which every row decodes."""
        now = time.thread_time_ns(), self._meter.core_ns, self._meter.own_ns
        self._turns_done += 1
        done = self._turns_done - WARM_UP_TURN_COUNT
        if done > 0 and done % SLICE_TURN_COUNT == 0:
            total, core, own = (
                after - before for after, before in zip(now, self._slice_begin, strict=True)
            )
            per = 1e-3 / self._slice_tokens
            self.costs.append(Cost(core * per, (total - core - own) * per))
        if done >= 0 and done % SLICE_TURN_COUNT == 0:
            self._slice_begin, self._slice_tokens = now, 0
        self._slice_tokens += tokens
        if done >= self._turns_left:
            self.is_over.set()

    def send(self, peer: bytes, frame: bytes) -> SendOutcome:
        begin = time.thread_time_ns()
        message = decode_for_worker(frame)
        if isinstance(message, Plan):
            self._engine.apply(message)
            self._ready.set()
        else:
            assert isinstance(message, Welcome)
        self._meter.own_ns += time.thread_time_ns() - begin
        return SendOutcome.SENT

    def waiting_count(self, peer: bytes) -> int:
        return 0

    def take_gone(self) -> list[bytes]:
        return []


class ClientLink:
    """The shell's link to one client: its requests, once, and then it only reads."""

    def __init__(self, submits: list[Submit], joined: trio.Event) -> None:
        self._submits = submits
        self._joined = joined

    async def receive(self) -> list[tuple[bytes, bytes]]:
        await self._joined.wait()
        if not self._submits:
            await trio.sleep_forever()
        submits, self._submits = self._submits, []
        return [(b"client", encode(submit)) for submit in submits]

    def send(self, peer: bytes, frame: bytes) -> SendOutcome:
        return SendOutcome.SENT

    def waiting_count(self, peer: bytes) -> int:
        return 0

    def take_gone(self) -> list[bytes]:
        return []


def measure_cost(row_count: int, turn_count: int) -> Cost:
    """At `row_count` rows that decode together, for `turn_count` turns."""
    source = random.Random(0)
    turns = turn_count + WARM_UP_TURN_COUNT + 2 * row_count
    longest = Lengths(Tokens(1024), Tokens(turns))
    engine = MockEngine("engine", row_count, longest)
    submits = [
        Submit(
            RequestId(str(number)),
            "",
            # Rows reach the edges of their pages at different times.
            pack_ids([3] * source.randint(64, 1024)),
            turns,
            Sampling(),
            7,
        )
        for number in range(row_count)
    ]
    meter = Meter()
    settings = CoreSettings(chunk_tokens=None, waiting_count_max=row_count + 1)
    core = TimedCore(settings, meter)

    async def main() -> list[Cost]:
        workers = EngineLink(engine, meter, turn_count)
        joined = trio.Event()
        clients = ClientLink(submits, joined)
        log = configure("scheduler", os.devnull)
        shell = make_shell(core, workers, clients, log)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shell.run)
            await trio.sleep(0.1)
            joined.set()
            await workers.is_over.wait()
            nursery.cancel_scope.cancel()
        return workers.costs

    costs = trio.run(main)
    return Cost(median(c.core_us for c in costs), median(c.shell_us for c in costs))


def make_shell(core: Core, workers: EngineLink, clients: ClientLink, log: Log) -> Shell:
    seeds = random.Random(0)
    return Shell(core, workers, clients, log, ShellSettings(), "epoch", seeds, b"secret")
