"""Tokens a second through one scheduler process and real sockets; engines cost nothing.

Engines and clients share this process; the scheduler has its own. All rows decode before any
goes on, and what is counted ends with the first request that does. Beside the tokens a second
stands what share of a core each of the two processes used: whichever is at one is the limit.
"""

import gc
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from mock_engine import MockEngine
from tidegate.ipc.blocking_peer import BlockingPeer
from tidegate.ipc.protocol import (
    Accepted,
    Finished,
    NewTokens,
    Plan,
    Refused,
    RequestId,
    Sampling,
    Submit,
    decode_for_client,
    decode_for_worker,
    encode,
    pack_ids,
)
from tidegate.ipc.zmq_context import Context, open_context
from tidegate.kvcache.demand import Lengths
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.process import SchedulerSettings, run_scheduler
from tidegate.scheduler.settings import CoreSettings

PROMPT_TOKENS = Tokens(16)
OUTPUT_TOKENS = (64, 4096)  # Of each row, at least and at most.
WAITING_COUNT_MAX = 1 << 20
START_S_MAX = 240.0
RUN_S_MAX = 60.0
STOP_S_MAX = 60.0
UNANSWERED_COUNT_MAX = 64
JOIN_PAUSE_S = 0.05
SHARE_OF_LIMIT_MIN = 0.4  # Two processes that wait for each other each run half of the time.


class MockSize(msgspec.Struct, frozen=True):
    """One measurement: so many engines, rows on each, and client connections in all."""

    worker_count: int
    row_count: int
    client_count: int = 1


class MockSpeed(msgspec.Struct, frozen=True):
    """`scheduler_share` and `bench_share` are CPU over wall time, of one core each.

    `tokens_per_cpu_s` is for a second of the scheduler's CPU: the limit of a quiet machine.
    """

    tokens_per_s: float
    tokens_per_cpu_s: float
    scheduler_share: float
    bench_share: float

    @property
    def limit(self) -> str:
        """What set the speed; a process that hardly ran was not it."""
        if max(self.scheduler_share, self.bench_share) < SHARE_OF_LIMIT_MIN:
            return "machine, which had other things to do"
        return "scheduler" if self.scheduler_share >= self.bench_share else "mock engines"


class Client:
    """One connection that counts what it gets."""

    def __init__(self, context: Context, endpoint: str) -> None:
        self.peer = BlockingPeer(context, endpoint, secrets.token_hex(16).encode())
        self.token_count = 0
        self.accepted_count = 0
        self.finished_count = 0

    def submit(self, number: int, output_tokens: int) -> None:
        prompt = pack_ids([3] * PROMPT_TOKENS)
        name = RequestId(str(number))
        self.peer.send(encode(Submit(name, "", prompt, output_tokens, Sampling(), 7)))

    def read(self) -> bool:
        """Take all that is there; says whether there was anything."""
        frames = self.peer.receive_all()
        for frame in frames:
            match decode_for_client(frame):
                case NewTokens(tokens=tokens):
                    self.token_count += len(tokens) // 4
                case Accepted():
                    self.accepted_count += 1
                case Finished():
                    self.finished_count += 1
                case Refused(text=text):
                    raise RuntimeError(f"a request was refused: {text}")
                case _:
                    pass
        return bool(frames)


class MockFleet:
    """Engines and clients around a scheduler at `folder`."""

    def __init__(self, context: Context, folder: Path, size: MockSize, tokens: int) -> None:
        self._size = size
        self._rows = size.worker_count * size.row_count
        self.output_tokens = max(OUTPUT_TOKENS[0], min(OUTPUT_TOKENS[1], tokens // self._rows))
        longest = Lengths(PROMPT_TOKENS, Tokens(self.output_tokens))
        self._may_decode = False
        self._engines: list[tuple[MockEngine, BlockingPeer]] = []
        for number in range(size.worker_count):
            engine = MockEngine(
                f"mock-{number}", size.row_count, longest, may_decode=lambda: self._may_decode
            )
            identity = secrets.token_hex(16).encode()
            peer = BlockingPeer(context, f"ipc://{folder}/workers", identity)
            self._engines.append((engine, peer))
        self._clients = [
            Client(context, f"ipc://{folder}/clients") for _ in range(size.client_count)
        ]

    def close(self) -> None:
        for _, peer in self._engines:
            peer.close()
        for client in self._clients:
            client.peer.close()

    def begin(self) -> None:
        """Join, submit, and run every prompt; all rows decode when this returns."""
        for engine, peer in self._engines:
            self._await_connection(peer)
            peer.send(encode(engine.hello))
        time.sleep(JOIN_PAUSE_S)
        for client in self._clients:
            self._await_connection(client.peer)
        for number in range(self._rows):
            self._clients[number % len(self._clients)].submit(number, self.output_tokens)
            if not self._is_accepted(number):
                self._await(partial(self._is_accepted, number), "answer")
        self._await(
            lambda: all(e.decoding_count == e.row_count for e, _ in self._engines), "prompt"
        )
        self._await(lambda: self.token_count == self._rows, "first token")

    def _is_accepted(self, number: int) -> bool:
        """Few enough of the requests up to this one have not been answered yet."""
        accepted = sum(client.accepted_count for client in self._clients)
        return number - accepted < UNANSWERED_COUNT_MAX

    @property
    def token_count(self) -> int:
        return sum(client.token_count for client in self._clients)

    def measure(self, scheduler_pid: int) -> MockSpeed:
        before = self.token_count
        gc.collect()
        self._may_decode = True
        begin, begin_cpu = time.perf_counter(), cpu_s(scheduler_pid)
        begin_own = time.process_time()
        deadline = begin + RUN_S_MAX
        while not any(client.finished_count for client in self._clients):
            if time.perf_counter() > deadline:
                raise RuntimeError("the run does not come to an end")
            self._step()
        seconds = time.perf_counter() - begin
        scheduler_s = cpu_s(scheduler_pid) - begin_cpu
        own_s = time.process_time() - begin_own
        tokens = self.token_count - before
        return MockSpeed(
            tokens / seconds, tokens / scheduler_s, scheduler_s / seconds, own_s / seconds
        )

    def _step(self) -> None:
        """One launch of each engine that has something to do."""
        for engine, peer in self._engines:
            for frame in peer.receive_all():
                message = decode_for_worker(frame)
                if isinstance(message, Plan):
                    engine.apply(message)
            report = engine.launch()
            if report is not None:
                peer.send(encode(report))
        for client in self._clients:
            client.read()

    def _await_connection(self, peer: BlockingPeer) -> None:
        self._await(lambda: peer.connected, "connection")

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.perf_counter() + START_S_MAX
        while not holds():
            if time.perf_counter() > deadline:
                raise RuntimeError(f"no {what} within {START_S_MAX:g} s")
            self._step()


def measure_mock(size: MockSize, tokens: int) -> MockSpeed:
    """About `tokens` tokens, of engines of this size."""
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name,
        scheduler(Path(name)) as pid,
        open_context() as context,
    ):
        fleet = MockFleet(context, Path(name), size, tokens)
        try:
            fleet.begin()
            return fleet.measure(pid)
        finally:
            fleet.close()


@contextmanager
def scheduler(folder: Path) -> Generator[int]:
    """A scheduler's process, whose sockets are in `folder`."""
    process = subprocess.Popen([sys.executable, __file__, str(folder)])
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(STOP_S_MAX)


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used, all of its threads together."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main(folder: str) -> int:
    """The scheduler's process."""
    return run_scheduler(
        SchedulerSettings(
            client_endpoint=f"ipc://{folder}/clients",
            worker_endpoint=f"ipc://{folder}/workers",
            core=CoreSettings(chunk_tokens=None, waiting_count_max=WAITING_COUNT_MAX),
            log=Path(os.devnull),
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
