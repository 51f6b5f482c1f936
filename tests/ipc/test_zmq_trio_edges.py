"""Lost wake-ups: each edge provokes one on purpose, and each planted fault fails an edge.

Random load does not find these faults, because the next message hides a lost wake-up. Here
nothing follows: the wake-up that is swallowed is the last one.
"""

import inspect
import itertools
import select
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq

from tidegate.ipc import zmq_parking, zmq_trio
from tidegate.ipc.zmq_context import Context, open_context
from tidegate.ipc.zmq_trio import Socket


@dataclass(frozen=True)
class Trial:
    """An answer takes less than a millisecond; after `lost_s` it counts as lost."""

    context: Context
    endpoint: str
    round_count: int
    lost_s: float


# Pieces of source, and what each planted fault puts in their place.
SERVE = "self.serve_parked()"
KEPT = """\
            if not operation.done:
                queue.remove(operation)
                raise
"""
DROPPED = """\
            if operation in queue:
                queue.remove(operation)
            raise
"""
FAULTS = {
    "not served after a call": [("perform", SERVE, "pass"), ("perform_now", SERVE, "pass")],
    "not served after an error": [("perform", f"{SERVE}\n                raise", "raise")],
    "not served when parking": [("_park", "self._serve()", "pass")],
    "not served after set-up": [("serve_parked", "self._serve()", "pass")],
    "a router's leader not hurried": [("_park", "self._hurry_leader()", "pass")],
    "poll not handed over": [("_park", "self._hand_over()", "pass")],
    "result dropped at a cancellation": [("_park", KEPT, DROPPED)],
}


def faulty_parking(replacements: list[tuple[str, str, str]]) -> type[zmq_parking.Parking]:
    """A copy of `Parking` with pieces of some methods' source replaced."""
    sources: dict[str, str] = {}
    for name, old, new in replacements:
        source = sources.get(name) or inspect.getsource(getattr(zmq_parking.Parking, name))
        assert old in source, f"{name} has changed: {old!r} is not in it any more"
        sources[name] = source.replace(old, new)
    methods: dict[str, object] = {}
    for source in sources.values():
        exec(textwrap.dedent(source), zmq_parking.__dict__, methods)
    return type("FaultyParking", (zmq_parking.Parking,), methods)


@contextmanager
def echo_peer(context: Context, endpoint: str) -> Generator[None]:
    """A blocking ROUTER in a thread, which answers what begins with `r` and nothing else."""
    peer = context.socket(zmq.ROUTER)
    peer.linger = 0
    peer.bind(endpoint)

    def answer() -> None:
        while True:
            identity, message = peer.recv_multipart()
            if message == b"quit":
                return
            if message.startswith(b"r"):
                peer.send_multipart([identity, message])

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with context.socket(zmq.DEALER) as last:
            last.linger = 1000
            last.connect(endpoint)
            last.send(b"quit")
        thread.join(2)
        peer.close()
        assert not thread.is_alive()


def block_the_loop(socket: Socket) -> None:
    """Let a message arrive while no task runs."""
    poller = select.poll()  # Not `select`, which knows no descriptors from 1,024 on.
    poller.register(socket.raw.FD, select.POLLIN)
    readable = poller.poll(5_000)
    assert readable
    time.sleep(0.003)  # A send looks at what has arrived only once in a millisecond.


async def until_parked(queue: zmq_parking.Queue, count: int) -> None:
    await trio.testing.wait_all_tasks_blocked()
    assert len(queue) == count


def take_leftovers(socket: Socket) -> int:
    """How many messages lay in the socket although nobody was woken for them."""
    count = 0
    while True:
        try:
            socket.raw.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return count
        count += 1


# Each edge returns how many of its rounds went wrong.


async def a_send_swallows_the_answers_arrival(trial: Trial) -> int:
    return await answers_lost(trial, lambda socket: socket.send(b"heartbeat"))


async def a_send_now_swallows_the_answers_arrival(trial: Trial) -> int:
    async def act(socket: Socket) -> None:
        socket.send_nowait([b"heartbeat"])

    return await answers_lost(trial, act)


async def answers_lost(trial: Trial, act: Callable[[Socket], Awaitable[None]]) -> int:
    lost = 0
    with echo_peer(trial.context, trial.endpoint):
        async with Socket(trial.context, zmq.DEALER) as socket:
            socket.connect(trial.endpoint)
            for _ in range(trial.round_count):
                async with trio.open_nursery() as nursery:
                    got = trio.Event()

                    async def read(got: trio.Event = got) -> None:
                        await socket.recv()
                        got.set()

                    nursery.start_soon(read)
                    await until_parked(socket.parking.readers, 1)
                    socket.raw.send(b"r")  # On the plain socket, so that no task runs.
                    block_the_loop(socket)
                    await act(socket)
                    with trio.move_on_after(trial.lost_s):
                        await got.wait()
                    nursery.cancel_scope.cancel()
                if not got.is_set():
                    lost += 1
                    take_leftovers(socket)
    return lost


async def a_failing_send_swallows_a_messages_arrival(trial: Trial) -> int:
    lost = 0
    async with Socket(trial.context, zmq.ROUTER, router_mandatory=1) as router:
        router.bind(trial.endpoint)
        with trial.context.socket(zmq.DEALER) as peer:
            peer.connect(trial.endpoint)
            peer.send(b"hello")
            await router.recv_multipart()
            for _ in range(trial.round_count):
                async with trio.open_nursery() as nursery:
                    got = trio.Event()

                    async def read(got: trio.Event = got) -> None:
                        await router.recv_multipart()
                        got.set()

                    nursery.start_soon(read)
                    await until_parked(router.parking.readers, 1)
                    peer.send(b"hello")
                    block_the_loop(router)
                    with pytest.raises(zmq.ZMQError):
                        await router.send_multipart([b"nobody", b"x"])
                    with trio.move_on_after(trial.lost_s):
                        await got.wait()
                    nursery.cancel_scope.cancel()
                if not got.is_set():
                    lost += 1
                    take_leftovers(router)
    return lost


async def the_polling_task_is_cancelled(trial: Trial) -> int:
    lost = 0
    with echo_peer(trial.context, trial.endpoint):
        async with Socket(trial.context, zmq.DEALER) as socket:
            socket.connect(trial.endpoint)
            await socket.send(b"r")
            await socket.recv()
            for _ in range(trial.round_count):
                async with trio.open_nursery() as nursery:
                    got = trio.Event()
                    leader = trio.CancelScope()

                    async def lead(leader: trio.CancelScope = leader) -> None:
                        with leader:
                            await socket.recv()

                    async def follow(got: trio.Event = got) -> None:
                        await socket.recv()
                        got.set()

                    nursery.start_soon(lead)
                    await until_parked(socket.parking.readers, 1)
                    nursery.start_soon(follow)
                    await until_parked(socket.parking.readers, 2)
                    leader.cancel()
                    await until_parked(socket.parking.readers, 1)
                    socket.raw.send(b"r")
                    with trio.move_on_after(trial.lost_s):
                        await got.wait()
                    nursery.cancel_scope.cancel()
                if not got.is_set():
                    lost += 1
                    take_leftovers(socket)
    return lost


async def a_failed_receive_swallows_the_room_to_send(trial: Trial) -> int:
    lost = 0
    for number in range(trial.round_count):
        address = f"inproc://room-{trial.endpoint}-{number}"
        with trial.context.socket(zmq.DEALER) as peer:
            peer.rcvhwm = 2
            peer.bind(address)
            async with Socket(trial.context, zmq.DEALER, sndhwm=2) as socket:
                socket.connect(address)
                sent_count = fill(socket, [b"x"])
                async with trio.open_nursery() as nursery:
                    sent = trio.Event()

                    async def send(socket: Socket = socket, sent: trio.Event = sent) -> None:
                        await socket.send(b"last")
                        sent.set()

                    nursery.start_soon(send)
                    await until_parked(socket.parking.senders, 1)
                    for _ in range(sent_count):
                        peer.recv()
                    with trio.move_on_after(0.01):
                        await socket.recv()
                    with trio.move_on_after(trial.lost_s):
                        await sent.wait()
                    lost += not sent.is_set()
                    nursery.cancel_scope.cancel()
    return lost


def fill(socket: Socket, parts: list[bytes]) -> int:
    """How many messages go out until there is no more room."""
    count = 0
    while True:
        try:
            socket.send_nowait(parts)
        except trio.WouldBlock:
            return count
        count += 1


async def a_task_is_served_and_cancelled_at_once(trial: Trial) -> int:
    lost = 0
    with echo_peer(trial.context, trial.endpoint):
        async with Socket(trial.context, zmq.DEALER) as socket:
            socket.connect(trial.endpoint)
            await socket.send(b"r")
            await socket.recv()
            for _ in range(trial.round_count):
                received: list[bytes] = []
                scope = trio.CancelScope()

                async def read(
                    received: list[bytes] = received, scope: trio.CancelScope = scope
                ) -> None:
                    with scope:
                        received.append(await socket.recv())

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read)
                    await until_parked(socket.parking.readers, 1)
                    socket.raw.send(b"r")
                    block_the_loop(socket)
                    socket.parking.serve_parked()
                    scope.cancel()
                if not received and not take_leftovers(socket):
                    lost += 1
    return lost


async def a_bind_swallows_the_answers_arrival(trial: Trial) -> int:
    numbers = itertools.count()

    async def act(socket: Socket) -> None:
        socket.bind(f"inproc://{next(numbers)}-{trial.endpoint}")  # Nobody connects to it.

    return await answers_lost(trial, act)


async def somebody_swallows_the_room_to_send_of_a_router(trial: Trial) -> int:
    lost = 0
    for number in range(trial.round_count):
        address = f"inproc://router-{trial.endpoint}-{number}"
        async with Socket(trial.context, zmq.ROUTER, router_mandatory=1, sndhwm=2) as router:
            router.bind(address)
            with trial.context.socket(zmq.DEALER) as peer:
                peer.set(zmq.IDENTITY, b"peer")
                peer.rcvhwm = 2
                peer.connect(address)
                peer.send(b"hello")
                await router.recv_multipart()
                sent_count = fill(router, [b"peer", b"x"])
                async with trio.open_nursery() as nursery:
                    sent = trio.Event()

                    async def send(router: Socket = router, sent: trio.Event = sent) -> None:
                        await router.send_multipart([b"peer", b"last"])
                        sent.set()

                    nursery.start_soon(router.recv_multipart)
                    await until_parked(router.parking.readers, 1)
                    nursery.start_soon(send)
                    await until_parked(router.parking.senders, 1)
                    for _ in range(sent_count):
                        peer.recv()
                    router.raw.get(zmq.EVENTS)
                    with trio.move_on_after(trial.lost_s):
                        await sent.wait()
                    lost += not sent.is_set()
                    nursery.cancel_scope.cancel()
    return lost


EDGES = [
    a_bind_swallows_the_answers_arrival,
    somebody_swallows_the_room_to_send_of_a_router,
    a_send_swallows_the_answers_arrival,
    a_send_now_swallows_the_answers_arrival,
    a_failing_send_swallows_a_messages_arrival,
    the_polling_task_is_cancelled,
    a_failed_receive_swallows_the_room_to_send,
    a_task_is_served_and_cancelled_at_once,
]


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__)
async def test_no_wake_up_is_lost_when(
    edge: Callable[[Trial], Awaitable[int]], tmp_path: Path
) -> None:
    with open_context() as context, trio.fail_after(30):
        assert await edge(Trial(context, f"ipc://{tmp_path}/edge", 20, lost_s=1)) == 0


# Which edges each planted fault fails; every edge is here, so every edge can fail.
FAILING = {
    "not served after a call": [
        a_send_swallows_the_answers_arrival,
        a_send_now_swallows_the_answers_arrival,
    ],
    "not served after an error": [a_failing_send_swallows_a_messages_arrival],
    "not served when parking": [a_failed_receive_swallows_the_room_to_send],
    "not served after set-up": [a_bind_swallows_the_answers_arrival],
    "a router's leader not hurried": [somebody_swallows_the_room_to_send_of_a_router],
    "poll not handed over": [the_polling_task_is_cancelled],
    "result dropped at a cancellation": [a_task_is_served_and_cancelled_at_once],
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_edges_catch_the_planted_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_trio, "Parking", faulty_parking(FAULTS[fault]))
    with open_context() as context, trio.fail_after(30):
        for number, edge in enumerate(FAILING[fault]):
            trial = Trial(context, f"ipc://{tmp_path}/edge{number}", 5, lost_s=0.05)
            assert await edge(trial) > 0
