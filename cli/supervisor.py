"""The supervisor: the processes of one server live together and end together.

1. All children are started.
2. They run until one of them ends, a signal asks to stop, or they do not become ready.
3. They are told to stop, stage by stage, each with a moment of grace: first the one that
   talks to users, which tells them; the one that all others talk to comes last.
4. Whatever still runs is killed. A second signal goes to this point at once.

So the end of any process ends all, with a status that says so: nothing is half alive. But a
worker that makes no progress is killed when the scheduler asks for it, and started again.
"""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

import msgspec
import trio

from tidegate.cli.children import Child, ChildSpec, StopStage
from tidegate.cli.fencing import Fences, Fencing

# Together they stay below the 3 s in which everything has to be gone.
GRACE_S = {StopStage.FRONT: 1.3, StopStage.MIDDLE: 0.7, StopStage.LAST: 0.5}

STATUS_STOPPED = 0  # Asked to stop, by Ctrl-C too, and stopped in order.
STATUS_FAILED = 1
STATUS_CUT_SHORT = 130  # A second signal: everything was killed.


class NotReady(Exception):
    """The server did not become ready; the text says why."""


class Ending(msgspec.Struct, frozen=True):
    """Why everything ends, for people, and the exit status."""

    status: int
    text: str


async def supervise(
    specs: Sequence[ChildSpec],
    while_running: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
    fencing: Fencing | None = None,
) -> int:
    """Run the children until it is time to end, end them all, and return the exit status.

    `fencing` is how the scheduler asks for a worker to be killed.
    `while_running` runs beside them and may return at any time; `NotReady` from it ends all.
    Runs on the main thread. Raises `OSError` if a child cannot be started.
    """
    children: list[Child] = []
    with trio.open_signal_receiver(*_signals_to_heed()) as signals:
        try:
            for spec in specs:
                children.append(Child.start(spec))
            fences = Fences(fencing)
            ending = await _first_ending(children, signals, while_running, fences)
            say(ending.text)
            if not await _stop(children, signals):
                ending = Ending(STATUS_CUT_SHORT, "a second signal: everything is killed")
                say(ending.text)
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.reap()
    return ending.status


async def _first_ending(
    children: list[Child],
    signals: AsyncIterator[int],
    while_running: Callable[[], Awaitable[None]],
    fences: Fences,
) -> Ending:
    """Returns why all is to end. Children that are started again take their old one's place."""
    endings: list[Ending] = []
    async with trio.open_nursery() as nursery:

        def end(status: int, text: str) -> None:
            endings.append(Ending(status, text))
            nursery.cancel_scope.cancel()

        async def watch(index: int) -> None:
            await children[index].wait_exited()
            while fences.may_restart(children[index]):
                try:
                    children[index] = fences.restart(children[index])
                except OSError as error:
                    end(STATUS_FAILED, f"a worker cannot be started again: {error}")
                    return
                await children[index].wait_exited()
            child = children[index]
            end(
                STATUS_FAILED,
                f"the {child.spec.name} {child.how_it_ended()}; everything is stopped",
            )

        async def listen() -> None:
            async for number in signals:
                end(STATUS_STOPPED, f"{signal.Signals(number).name}: stopping")

        async def run() -> None:
            try:
                await while_running()
            except NotReady as error:
                end(STATUS_FAILED, f"{error}; everything is stopped")

        for index in range(len(children)):
            nursery.start_soon(watch, index)
        nursery.start_soon(fences.heed, children)
        nursery.start_soon(listen)
        nursery.start_soon(run)
    return endings[0]


async def _stop(children: Sequence[Child], signals: AsyncIterator[int]) -> bool:
    """Tell the children to stop, in order. False if another signal cut it short."""
    is_cut_short = False
    async with trio.open_nursery() as nursery:

        async def listen() -> None:
            nonlocal is_cut_short
            async for number in signals:
                # A closing terminal sends SIGHUP behind another signal: that is no haste.
                if number != signal.SIGHUP:
                    is_cut_short = True
                    nursery.cancel_scope.cancel()

        nursery.start_soon(listen)
        for stage, grace_s in GRACE_S.items():
            await _stop_some([c for c in children if c.spec.stage is stage], grace_s)
        nursery.cancel_scope.cancel()
    return not is_cut_short


async def _stop_some(children: Iterable[Child], grace_s: float) -> None:
    """Ask these children to end, and wait until they have, at most `grace_s` seconds."""
    with trio.move_on_after(grace_s):
        async with trio.open_nursery() as nursery:
            for child in children:
                child.terminate()
                if not child.has_exited:
                    nursery.start_soon(child.wait_exited)


def _signals_to_heed() -> tuple[signal.Signals, ...]:
    # Under `nohup` the closing terminal is to be ignored.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
