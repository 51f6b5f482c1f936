"""A scheduler that does what a test says: it owns the socket that workers connect to."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from tidegate.ipc.protocol import (
    PROTOCOL_VERSION,
    Fault,
    Goodbye,
    Hello,
    Incarnation,
    Operation,
    Plan,
    PlanSeq,
    PoolId,
    Report,
    SchedulerToWorker,
    Welcome,
    WorkerId,
    WorkerToScheduler,
    decode_from_worker,
    encode,
)

TIMEOUT_S = 60.0


class ScriptedScheduler:
    """Binds `folder`/workers.sock. Use it as a context manager."""

    def __init__(self, folder: Path, report_interval_ms: int = 500) -> None:
        self.endpoint = f"ipc://{folder}/workers.sock"
        self._report_interval_ms = report_interval_ms
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self.endpoint)
        self._peers: dict[WorkerId, bytes] = {}
        self._names: dict[bytes, WorkerId] = {}
        self._arrived: dict[WorkerId, deque[WorkerToScheduler]] = {}
        self._seqs: dict[WorkerId, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def hello_of(self, worker: WorkerId) -> Hello:
        """Wait for the worker's `Hello`."""
        hello = self.wait_for(worker, lambda message: isinstance(message, Hello))
        assert isinstance(hello, Hello)
        return hello

    def welcome(self, worker: WorkerId) -> Hello:
        """Wait for the worker and welcome it."""
        hello = self.hello_of(worker)
        pool, incarnation = PoolId(worker), Incarnation(1)
        self.send(
            worker,
            Welcome(
                PROTOCOL_VERSION,
                "epoch",
                pool,
                incarnation,
                hello.row_count_max,
                self._report_interval_ms,
            ),
        )
        self._seqs[worker] = 0
        return hello

    def plan(self, worker: WorkerId, *operations: Operation) -> int:
        """Send the next plan; returns its number."""
        self._seqs[worker] += 1
        self.send(worker, Plan(PlanSeq(self._seqs[worker]), operations))
        return self._seqs[worker]

    def send(self, worker: WorkerId, message: SchedulerToWorker) -> None:
        self.send_frame(worker, encode(message))

    def send_frame(self, worker: WorkerId, frame: bytes) -> None:
        self._socket.send_multipart([self._peers[worker], frame])

    def next_of(self, worker: WorkerId, timeout_s: float = TIMEOUT_S) -> WorkerToScheduler:
        """The worker's next message. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while not self._arrived.get(worker):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._socket.poll(int(left_s * 1000) + 1):
                raise TimeoutError(f"worker {worker} sent nothing for {timeout_s} s")
            self._receive()
        return self._arrived[worker].popleft()

    def wait_for(
        self,
        worker: WorkerId,
        wanted: Callable[[WorkerToScheduler], bool],
        timeout_s: float = TIMEOUT_S,
    ) -> WorkerToScheduler:
        """The worker's next message that is wanted; those before it are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.next_of(worker, max(0.0, deadline - time.monotonic()))
            if wanted(message):
                return message

    def reports_until(
        self, worker: WorkerId, is_last: Callable[[Report], bool]
    ) -> list[Report]:
        """Reports up to the first that `is_last`. Nothing else may come.

        Raises `TimeoutError`, also while others go on coming.
        """
        reports: list[Report] = []
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError(f"worker {worker} sent {len(reports)} other reports")
            message = self.next_of(worker)
            assert isinstance(message, Report), message
            reports.append(message)
            if is_last(message):
                return reports

    def fault_of(self, worker: WorkerId) -> Fault:
        fault = self.wait_for(worker, lambda message: isinstance(message, Fault))
        assert isinstance(fault, Fault)
        return fault

    def goodbye_of(self, worker: WorkerId, timeout_s: float = TIMEOUT_S) -> Goodbye:
        goodbye = self.wait_for(worker, lambda message: isinstance(message, Goodbye), timeout_s)
        assert isinstance(goodbye, Goodbye)
        return goodbye

    def _receive(self) -> None:
        peer, frame = self._socket.recv_multipart()
        message = decode_from_worker(frame)
        if isinstance(message, Hello):
            self._peers[message.worker] = peer
            self._names[peer] = message.worker
        self._arrived.setdefault(self._names[peer], deque()).append(message)
