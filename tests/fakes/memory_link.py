"""A worker's link in memory, whose waits pass at once on a clock of its own."""

from collections.abc import Callable

from tidegate.ipc.protocol import (
    SchedulerToWorker,
    WorkerToScheduler,
    decode_from_worker,
    encode,
)


class MemoryLink:
    """Frames put in with `arrive` are received; those that were sent are in `sent`, decoded.

    `on_poll` is called before each wait, and may let frames arrive. `clock` tells seconds.
    """

    def __init__(self) -> None:
        self.inbox: list[bytes] = []
        self.sent: list[WorkerToScheduler] = []
        self.waits_ms: list[int] = []
        self.connected = True
        self.lost = False
        self.now_s = 1000.0
        self.on_poll: Callable[[], None] = lambda: None

    def clock(self) -> float:
        return self.now_s

    def arrive(self, *messages: SchedulerToWorker) -> None:
        self.inbox += [encode(message) for message in messages]

    def poll(self, timeout_ms: int) -> bool:
        self.on_poll()
        if not self.inbox:
            self.waits_ms.append(timeout_ms)
            self.now_s += timeout_ms / 1000
        return bool(self.inbox)

    def receive_all(self) -> list[bytes]:
        frames, self.inbox = self.inbox, []
        return frames

    def send(self, frame: bytes) -> None:
        self.sent.append(decode_from_worker(frame))

    def take_sent(self) -> list[WorkerToScheduler]:
        sent, self.sent = self.sent, []
        return sent
