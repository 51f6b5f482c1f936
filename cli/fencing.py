"""Workers that the scheduler has given up are killed, and started again, but not for ever."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import trio

from tidegate.cli.children import Child, ChildSpec
from tidegate.ipc.fence_pipe import read_pids

RESTART_COUNT_MAX = 3  # Within `RESTART_WINDOW_S`: then there is something wrong for good.
RESTART_WINDOW_S = 600.0
READ_BYTES_MAX = 4096


class Fencing(NamedTuple):
    """`fd` is the read end of the pipe that the scheduler writes to, and is closed at the end.
    `on_restart` is told which worker has been started again.
    """

    fd: int
    on_restart: Callable[[ChildSpec], None]


class Fences:
    """Which children were killed because the scheduler asked for it."""

    def __init__(self, fencing: Fencing | None) -> None:
        self._fencing = fencing
        self._killed: set[int] = set()
        self._restarts: deque[float] = deque()

    async def heed(self, children: Sequence[Child]) -> None:
        """Kill those of the children that the scheduler names, until cancelled."""
        if self._fencing is None:
            return
        rest = b""
        async with trio.lowlevel.FdStream(self._fencing.fd) as stream:
            while data := await stream.receive_some(READ_BYTES_MAX):
                pids, rest = read_pids(rest + data)
                for child in children:
                    if child.pid in pids and not child.has_exited:
                        self._killed.add(child.pid)
                        child.kill()

    def may_restart(self, child: Child) -> bool:
        """Was the child killed here, and not too often of late?"""
        now_s = trio.current_time()
        while self._restarts and self._restarts[0] < now_s - RESTART_WINDOW_S:
            self._restarts.popleft()
        return child.pid in self._killed and len(self._restarts) < RESTART_COUNT_MAX

    def restart(self, child: Child) -> Child:
        """A new process in place of one that has ended. Raises `OSError`."""
        assert self._fencing is not None
        child.reap()
        self._restarts.append(trio.current_time())
        new = Child.start(child.spec)
        self._fencing.on_restart(child.spec)
        return new
