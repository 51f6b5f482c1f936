"""The supervisor, over tiny programs that stand in for the scheduler, workers and the proxy."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from tidegate.cli.children import ChildSpec, StopStage, describe_status
from tidegate.cli.fencing import RESTART_COUNT_MAX, Fencing
from tidegate.cli.supervisor import (
    GRACE_S,
    STATUS_CUT_SHORT,
    STATUS_FAILED,
    STATUS_STOPPED,
    NotReady,
    supervise,
)
from tidegate.ipc.fence_pipe import ask_to_kill

DEADLINE_S = 10.0

# Each program notes what happens to it in a file: `NAME event` a line, in one order for all.
PRELUDE = """
import os, signal, sys, time
name, journal = sys.argv[1], sys.argv[2]
lifeline = int(sys.argv[sys.argv.index("--lifeline-fd") + 1])
def note(event):
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{name} {event}\\n".encode())
    os.close(fd)
def stop(*_):
    note("told")
    raise SystemExit(0)
"""
OBEDIENT = (
    PRELUDE
    + """
signal.signal(signal.SIGTERM, stop)
note(f"up {os.getpid()}")
os.read(lifeline, 1)
note("lifeline ended")
"""
)
SLOW_TO_STOP = OBEDIENT.replace("def stop(*_):\n", "def stop(*_):\n    time.sleep(0.3)\n", 1)
STUBBORN = (
    PRELUDE + "signal.signal(15, signal.SIG_IGN)\nnote(f'up {os.getpid()}')\ntime.sleep(60)\n"
)
FAILING = PRELUDE + "note('up')\nraise SystemExit(7)\n"


class Fleet:
    """Specs of stand-in programs, and the journal that they write."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal"
        self.said: list[str] = []

    def spec(self, name: str, program: str, stage: StopStage = StopStage.LAST) -> ChildSpec:
        command = (sys.executable, "-c", program, name, str(self.journal))
        return ChildSpec(name=name, command=command, stage=stage)

    def events(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def pids(self) -> dict[str, int]:
        up = [line.split() for line in self.events() if " up " in line]
        return {name: int(pid) for name, _, pid in up}

    async def wait_for(self, event: str, count: int = 1, timeout_s: float = DEADLINE_S) -> None:
        with trio.fail_after(timeout_s):
            # The journal is a file of other processes: nothing tells of a new line.
            while sum(event in line for line in self.events()) < count:  # noqa: ASYNC110
                await trio.sleep(0.01)

    async def run(self, specs: list[ChildSpec], then: Callable[[], object]) -> int:
        """Supervise, do `then` once all are up, and return the status."""

        async def act() -> None:
            await self.wait_for(" up", len(specs))
            then()

        with trio.fail_after(DEADLINE_S):
            return await supervise(specs, act, self.said.append)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_the_end_of_one_child_ends_all_and_is_told(fleet: Fleet) -> None:
    specs = [fleet.spec("scheduler", OBEDIENT), fleet.spec("worker", OBEDIENT)]
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(fleet.pids()["worker"], signal.SIGKILL)

    assert await fleet.run(specs, kill) == STATUS_FAILED
    assert time.monotonic() - killed_at[0] < 3
    assert fleet.said[0].startswith("the worker was killed by SIGKILL")
    assert "scheduler told" in fleet.events()
    assert not any(is_running(pid) for pid in fleet.pids().values())


async def test_a_child_that_fails_is_told_with_its_exit_status(fleet: Fleet) -> None:
    status = await fleet.run(
        [fleet.spec("scheduler", OBEDIENT), fleet.spec("proxy", FAILING)], lambda: None
    )
    assert status == STATUS_FAILED
    assert "the proxy ended with exit status 7" in fleet.said[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_stops_the_children_stage_by_stage(
    fleet: Fleet, number: signal.Signals
) -> None:
    specs = [
        fleet.spec("scheduler", OBEDIENT),
        fleet.spec("worker", SLOW_TO_STOP, StopStage.MIDDLE),
        fleet.spec("proxy", SLOW_TO_STOP, StopStage.FRONT),
    ]
    status = await fleet.run(specs, partial(os.kill, os.getpid(), number))
    assert status == STATUS_STOPPED
    told = [line for line in fleet.events() if line.endswith(" told")]
    assert told == ["proxy told", "worker told", "scheduler told"]


async def test_a_stubborn_child_is_killed_within_three_seconds(fleet: Fleet) -> None:
    specs = [
        fleet.spec("scheduler", STUBBORN),
        fleet.spec("worker", STUBBORN, StopStage.MIDDLE),
        fleet.spec("proxy", STUBBORN, StopStage.FRONT),
    ]
    stopped_at: list[float] = []

    def stop() -> None:
        stopped_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    status = await fleet.run(specs, stop)
    assert status == STATUS_STOPPED
    assert time.monotonic() - stopped_at[0] < 3
    assert not any(is_running(pid) for pid in fleet.pids().values())


async def test_a_second_signal_kills_at_once(fleet: Fleet) -> None:
    specs = [fleet.spec("proxy", STUBBORN, StopStage.FRONT)]
    first_sent = trio.Event()

    async def act() -> None:
        await fleet.wait_for(" up")
        os.kill(os.getpid(), signal.SIGINT)
        first_sent.set()

    sent_at: list[float] = []

    async def again() -> None:
        await first_sent.wait()
        sent_at.append(time.monotonic())
        await trio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    statuses: list[int] = []
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(again)
            statuses.append(await supervise(specs, act, fleet.said.append))
    assert statuses == [STATUS_CUT_SHORT]
    assert time.monotonic() - sent_at[0] < GRACE_S[StopStage.FRONT]
    assert not any(is_running(pid) for pid in fleet.pids().values())


async def test_a_server_that_does_not_become_ready_is_ended(fleet: Fleet) -> None:
    async def never() -> None:
        raise NotReady("not ready after 5 s: no decode worker has joined")

    with trio.fail_after(DEADLINE_S):
        status = await supervise([fleet.spec("scheduler", OBEDIENT)], never, fleet.said.append)
    assert status == STATUS_FAILED
    assert fleet.said[0].startswith("not ready after 5 s: no decode worker has joined")


async def test_a_program_that_cannot_be_started_leaves_nothing_behind(fleet: Fleet) -> None:
    missing = ChildSpec(name="worker", command=("/nonexistent/program",))
    with pytest.raises(FileNotFoundError):
        await fleet.run([fleet.spec("scheduler", STUBBORN), missing], lambda: None)
    assert not any(is_running(pid) for pid in fleet.pids().values())


SUPERVISE_ONE = """
import sys, trio
from tidegate.cli.children import ChildSpec
from tidegate.cli.supervisor import supervise
command = (sys.executable, "-c", sys.argv[1], "worker", sys.argv[2])
specs = [ChildSpec(name="worker", command=command)]
print(trio.run(supervise, specs, trio.sleep_forever, print))
"""


async def test_children_end_by_their_lifeline_when_the_supervisor_is_killed(
    fleet: Fleet,
) -> None:
    supervisor = subprocess.Popen(  # noqa: ASYNC220  # it only starts; nothing waits for it
        [sys.executable, "-c", SUPERVISE_ONE, OBEDIENT, str(fleet.journal)]
    )
    await fleet.wait_for(" up")
    supervisor.kill()
    supervisor.wait()
    await fleet.wait_for("worker lifeline ended", timeout_s=1)


async def test_a_child_does_not_hear_the_terminals_ctrl_c(fleet: Fleet) -> None:
    supervisor = subprocess.Popen(  # noqa: ASYNC220  # it only starts; nothing waits for it
        [sys.executable, "-c", SUPERVISE_ONE, OBEDIENT, str(fleet.journal)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    await fleet.wait_for(" up")
    os.killpg(supervisor.pid, signal.SIGINT)  # What a terminal does.
    output, _ = await trio.to_thread.run_sync(supervisor.communicate)
    assert output.split() == ["SIGINT:", "stopping", "0"]
    assert "worker told" in fleet.events()  # By SIGTERM, in its turn.


def test_statuses_are_described_for_people() -> None:
    assert describe_status(3) == "ended with exit status 3"
    assert describe_status(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert "--kv-memory" in describe_status(-signal.SIGKILL)


# --- Workers that the scheduler gives up ---


async def fence(fleet: Fleet, names: list[str], rounds: int) -> tuple[int, list[str]]:
    """Ask for the first program to be killed so often; returns the status, and who is back."""
    read_end, write_end = os.pipe()
    restarted: list[str] = []

    async def act() -> None:
        for number in range(1, rounds + 1):
            await fleet.wait_for(f"{names[0]} up", number)
            ask_to_kill(write_end, os.getpid())  # No child: nobody is killed.
            ask_to_kill(write_end, fleet.pids()[names[0]])
        await fleet.wait_for(f"{names[0]} up", rounds + 1)
        raise NotReady("enough")

    def note(spec: ChildSpec) -> None:
        restarted.append(spec.name)

    fencing = Fencing(read_end, note)
    specs = [fleet.spec(name, OBEDIENT) for name in names]
    try:
        with trio.fail_after(DEADLINE_S):
            return await supervise(specs, act, fleet.said.append, fencing), restarted
    finally:
        os.close(write_end)


async def test_a_worker_that_is_given_up_is_killed_and_started_again(fleet: Fleet) -> None:
    assert await fence(fleet, ["worker", "proxy"], 1) == (STATUS_FAILED, ["worker"])
    assert fleet.said == ["enough; everything is stopped"]
    ups = [line.split()[0] for line in fleet.events() if " up " in line]
    assert sorted(ups) == ["proxy", "worker", "worker"]
    assert not any(is_running(pid) for pid in fleet.pids().values())


async def test_a_worker_that_is_given_up_again_and_again_ends_everything(fleet: Fleet) -> None:
    status, restarted = await fence(fleet, ["worker"], RESTART_COUNT_MAX + 1)
    assert (status, restarted) == (STATUS_FAILED, ["worker"] * RESTART_COUNT_MAX)
    assert fleet.said[0].startswith("the worker was killed by SIGKILL")
