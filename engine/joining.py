"""How a worker becomes part of the fleet: `Hello` until there is an answer."""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from tidegate.engine.failures import LinkBroken, WorkerRejected
from tidegate.ipc.protocol import (
    Hello,
    Plan,
    Welcome,
    WorkerRefused,
    decode_for_worker,
    encode,
)

HELLO_INTERVAL_MS = 1000
SAY_INTERVAL_S = 10.0


class WorkerLink(Protocol):
    """The worker's one connection, to the scheduler. Frames arrive in order."""

    def poll(self, timeout_ms: int) -> bool:
        """Wait for a frame, at most `timeout_ms`; may return False early."""
        ...

    def receive_all(self) -> list[bytes]:
        """All frames that are there, without waiting."""
        ...

    def send(self, frame: bytes) -> None: ...

    @property
    def connected(self) -> bool:
        """Whether the connection is up."""
        ...

    @property
    def lost(self) -> bool:
        """Whether a connection was up and has been lost, even if another is up now."""
        ...


def decode_frame(frame: bytes) -> Welcome | WorkerRefused | Plan:
    """Raises `LinkBroken` for a frame that is none of these."""
    try:
        return decode_for_worker(frame)
    except msgspec.DecodeError as error:
        raise LinkBroken(f"the scheduler sent a malformed frame: {error}") from error


def join(
    link: WorkerLink,
    hello: Hello,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Welcome, list[bytes]]:
    """Send `hello` about once a second until the scheduler answers.

    There is no limit: a worker may start long before its scheduler. Returns the welcome, and
    the frames that came right behind it. Raises `WorkerRejected` or `LinkBroken`.
    """
    next_hello = next_say = clock()
    while True:
        now = clock()
        # Frames for a scheduler that is not there would only pile up.
        if now >= next_hello and link.connected:
            link.send(encode(hello))
            next_hello = now + HELLO_INTERVAL_MS / 1000
        if now >= next_say:
            say("waiting for the scheduler")
            next_say = now + SAY_INTERVAL_S
        link.poll(HELLO_INTERVAL_MS)
        frames = link.receive_all()
        if not frames:
            continue
        match decode_frame(frames[0]):
            case Welcome() as welcome:
                return welcome, frames[1:]
            case WorkerRefused(reason=reason):
                raise WorkerRejected(reason)
            case Plan():
                raise LinkBroken("a plan came before the welcome")
