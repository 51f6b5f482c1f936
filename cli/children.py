"""Child processes: starting them, hearing of their end, and ending them.

Life cycle of a child:

1. `Child.start` spawns it in a session of its own, so that the terminal's Ctrl-C reaches the
   supervisor alone, and gives it the read end of a pipe, its *lifeline*. When the supervisor
   is gone, however it went, the child reads the end of that pipe and ends itself.
2. `wait_exited` returns when its process has ended.
3. `terminate` asks it to end, `kill` ends it together with whatever it has started.
4. `reap` kills it if need be, collects its status and closes its descriptors.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum

import msgspec
import trio

REAP_TIMEOUT_S = 1.0  # After SIGKILL only a process stuck in the kernel takes longer.
LIFELINE_OPTION = "--lifeline-fd"


class StopStage(IntEnum):
    """When a child is told to stop: those of a stage after those of the stages before it."""

    FRONT = 0  # Talks to users, and has to tell them.
    MIDDLE = 1  # Says goodbye to the last.
    LAST = 2


class ChildSpec(msgspec.Struct, frozen=True):
    """What to start. `--lifeline-fd N` is appended to `command`."""

    name: str  # As people read it: "decode worker decode-0".
    command: tuple[str, ...]
    environment: Mapping[str, str] = {}  # Added to the parent's.
    descriptors: tuple[int, ...] = ()  # Open files that the child inherits.
    stage: StopStage = StopStage.LAST


class Child:
    """One running child process."""

    def __init__(
        self, spec: ChildSpec, process: "subprocess.Popen[bytes]", lifeline: int
    ) -> None:
        self.spec = spec
        self.pid = process.pid
        self._process = process
        self._lifeline = lifeline
        self._pidfd = os.pidfd_open(process.pid)

    @classmethod
    def start(cls, spec: ChildSpec) -> "Child":
        """Spawn it. Raises `OSError` if the system refuses."""
        read_end, write_end = os.pipe()
        try:
            # Popen on the calling thread: a process that dies with its parent *thread*
            # would not outlive one of trio's cached worker threads.
            process = subprocess.Popen(
                (*spec.command, LIFELINE_OPTION, str(read_end)),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                env={**os.environ, **spec.environment},
                pass_fds=(read_end, *spec.descriptors),
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(spec, process, write_end)

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    async def wait_exited(self) -> None:
        """Return when the process has ended. One task at a time may wait."""
        await trio.lowlevel.wait_readable(self._pidfd)
        self._process.wait()

    def how_it_ended(self) -> str:
        """For people: "was killed by SIGKILL". Only after it has ended."""
        assert self._process.returncode is not None
        return describe_status(self._process.returncode)

    def terminate(self) -> None:
        """Ask the process to end; nothing happens if it already has."""
        if not self.has_exited:
            self._process.terminate()

    def kill(self) -> None:
        """End the process and its descendants; nothing happens if it already has ended."""
        if not self.has_exited:
            # It leads its own process group, and is not reaped, so the number is still its.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Kill the process if it still runs, and forget it."""
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_TIMEOUT_S)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            os.close(self._pidfd)
            self._lifeline = self._pidfd = -1


def describe_status(returncode: int) -> str:
    """What a `Popen.returncode` means, for people."""
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = ""
    if name == "SIGKILL":
        hint = " (if nobody did that, the machine ran out of memory: see --kv-memory)"
    return f"was killed by {name}{hint}"
