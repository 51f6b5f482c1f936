"""`Socket`: order, cancellation, closing, and what a ROUTER promises."""

import random
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq

from tidegate.ipc.zmq_context import Context, open_context
from tidegate.ipc.zmq_trio import Socket

WAIT_S = 10  # Far more than anything here takes, so that a hang becomes a failure.


def pair(context: Context, folder: Path, **options: int) -> tuple[Socket, Socket]:
    """Two connected DEALERs."""
    endpoint = f"ipc://{folder}/pair"
    left = Socket(context, zmq.DEALER, **options)
    left.bind(endpoint)
    right = Socket(context, zmq.DEALER, **options)
    right.connect(endpoint)
    return left, right


async def test_a_message_arrives_as_its_parts(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        left, right = pair(context, tmp_path)
        async with left, right:
            await right.send_multipart([b"a", b"", b"c"])
            assert await left.recv_multipart() == [b"a", b"", b"c"]
            await left.send(b"answer")
            assert await right.recv() == b"answer"
            await left.send_multipart([b"too", b"many"])
            with pytest.raises(ValueError, match="one part was expected, not of 2"):
                await right.recv()


async def test_an_unknown_option_is_refused_and_leaves_no_socket() -> None:
    with open_context() as context:
        with pytest.raises(AttributeError, match=r"(?i)no_such_option"):
            Socket(context, zmq.DEALER, no_such_option=1)
        async with Socket(context, zmq.DEALER, sndhwm=7) as socket:
            assert socket.get(zmq.SNDHWM) == 7
            assert socket.get(zmq.LINGER) == 0


async def test_recv_many_takes_what_is_there_up_to_its_limit(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        left, right = pair(context, tmp_path)
        async with left, right:
            for number in range(5):
                await right.send(b"%d" % number)
            await trio.sleep(0.1)
            assert await left.recv_many(limit=3) == [[b"0"], [b"1"], [b"2"]]
            assert await left.recv_many(limit=3) == [[b"3"], [b"4"]]


async def test_parked_senders_go_out_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    count = 50
    with open_context() as context, trio.fail_after(WAIT_S):
        left, right = pair(context, tmp_path, sndhwm=1, rcvhwm=1)
        async with left, right, trio.open_nursery() as nursery:
            received: list[int] = []
            filled = 0
            payload = bytes(100_000)  # More than the kernel's buffer holds a few times.
            while True:
                try:
                    right.send_nowait([payload])
                except trio.WouldBlock:
                    break
                filled += 1
                await trio.sleep(0.01)
            for number in range(count):
                nursery.start_soon(right.send, b"%d" % number)
                await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.WouldBlock):
                right.send_nowait([b"may not overtake"])
            for _ in range(filled):
                await left.recv()
            for _ in range(count):
                received.append(int(await left.recv()))
            assert received == list(range(count))


async def test_parked_readers_are_served_in_the_order_in_which_they_came(
    tmp_path: Path,
) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        left, right = pair(context, tmp_path)
        got: dict[int, bytes] = {}

        async def read(number: int) -> None:
            got[number] = await left.recv()

        async with left, right, trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(read, number)
                await trio.testing.wait_all_tasks_blocked()
            for number in range(10):
                await right.send(b"%d" % number)
        assert got == {number: b"%d" % number for number in range(10)}


async def test_a_cancelled_receive_takes_no_message(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        left, right = pair(context, tmp_path)
        async with left, right:
            with trio.move_on_after(0.01) as scope:
                await left.recv()
            assert scope.cancelled_caught
            with trio.CancelScope() as scope:
                scope.cancel()
                await left.recv()
            assert scope.cancelled_caught
            await right.send(b"kept")
            assert await left.recv() == b"kept"


async def test_a_cancelled_send_sends_nothing(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        async with Socket(context, zmq.DEALER, sndhwm=1) as socket:
            socket.connect(f"ipc://{tmp_path}/later")
            await socket.send(b"first")
            with trio.move_on_after(0.01) as scope:
                await socket.send(b"cancelled while it waited")
            assert scope.cancelled_caught
            with trio.CancelScope() as scope:
                scope.cancel()
                await socket.send(b"cancelled before it began")
            assert scope.cancelled_caught
            async with Socket(context, zmq.DEALER) as peer:
                peer.bind(f"ipc://{tmp_path}/later")
                assert await peer.recv() == b"first"
                await socket.send(b"second")
                assert await peer.recv() == b"second"


async def test_every_call_is_a_checkpoint(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        left, right = pair(context, tmp_path)
        async with left, right:
            with trio.testing.assert_checkpoints():
                await right.send(b"x")
            await trio.sleep(0.1)
            with trio.testing.assert_checkpoints():
                await left.recv()
            with trio.testing.assert_no_checkpoints():
                right.send_nowait([b"y"])


async def test_closing_wakes_every_waiting_task(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        socket = Socket(context, zmq.DEALER, sndhwm=1)
        socket.connect(f"ipc://{tmp_path}/nobody")
        await socket.send(b"x")
        ended: list[str] = []

        async def wait(call: str) -> None:
            with pytest.raises(trio.ClosedResourceError):
                await (socket.recv() if call == "recv" else socket.send(b"y"))
            ended.append(call)

        async with trio.open_nursery() as nursery:
            for call in ("recv", "recv", "send", "send"):
                nursery.start_soon(wait, call)
            await trio.testing.wait_all_tasks_blocked()
            socket.close()
            socket.close()
        assert sorted(ended) == ["recv", "recv", "send", "send"]
        with pytest.raises(trio.ClosedResourceError):
            await socket.recv()
        with pytest.raises(trio.ClosedResourceError):
            socket.send_nowait([b"z"])


async def test_close_with_a_linger_time_delivers_what_was_sent(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        left, right = pair(context, tmp_path)
        async with left:
            for number in range(100):
                right.send_nowait([b"%d" % number])
            right.close(linger_ms=5000)
            assert [int(await left.recv()) for _ in range(100)] == list(range(100))


async def test_a_router_tells_that_a_peer_is_unknown(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        async with Socket(context, zmq.ROUTER, router_mandatory=1) as router:
            router.bind(f"ipc://{tmp_path}/router")
            with pytest.raises(zmq.ZMQError) as caught:
                await router.send_multipart([b"nobody", b"x"])
            assert caught.value.errno == zmq.EHOSTUNREACH
            with pytest.raises(zmq.ZMQError) as caught:
                router.send_nowait([b"nobody", b"x"])
            assert caught.value.errno == zmq.EHOSTUNREACH


async def test_a_full_peer_of_a_router_holds_up_nobody_else() -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        async with (
            Socket(context, zmq.ROUTER, router_mandatory=1, sndhwm=2) as router,
            Socket(context, zmq.DEALER, identity=b"slow", rcvhwm=2) as slow,
            Socket(context, zmq.DEALER, identity=b"fast", rcvhwm=2) as fast,
        ):
            router.bind("inproc://router")
            for peer in (slow, fast):
                peer.connect("inproc://router")
                await peer.send(b"hello")
                await router.recv_multipart()
            room = 0
            while True:
                try:
                    router.send_nowait([b"slow", b"%d" % room])
                except trio.WouldBlock:
                    break
                room += 1
            async with trio.open_nursery() as nursery:
                for number in (room, room + 1):
                    nursery.start_soon(router.send_multipart, [b"slow", b"%d" % number])
                    await trio.testing.wait_all_tasks_blocked()
                for number in range(100):
                    # In turn parked behind the slow one's senders, and not.
                    if number % 2:
                        await router.send_multipart([b"fast", b"%d" % number])
                    else:
                        router.send_nowait([b"fast", b"%d" % number])
                    assert await fast.recv() == b"%d" % number
                received = [int(await slow.recv()) for _ in range(room + 2)]
            assert received == list(range(room + 2))


@pytest.mark.parametrize("seed", range(4))
async def test_under_random_load_every_message_arrives_once_and_in_order(
    seed: int, tmp_path: Path
) -> None:
    """Tasks on both sides send, receive and are cancelled at random moments."""
    sender_count, message_count = 4, 150
    chance = random.Random(seed)
    received: list[bytes] = []
    complete = trio.Event()

    async def send(socket: Socket, sender: int) -> None:
        for number in range(message_count):
            sent = False
            while not sent:
                with trio.move_on_after(chance.choice((0, 0.0005, 1))):
                    await socket.send(b"%d %d" % (sender, number))
                    sent = True
            if chance.random() < 0.1:
                await trio.sleep(chance.random() / 500)

    async def receive(socket: Socket) -> None:
        while True:
            with trio.move_on_after(chance.choice((0, 0.0005, 1))):
                if chance.random() < 0.5:
                    received.append(await socket.recv())
                else:
                    received.extend(parts[0] for parts in await socket.recv_many(3))
            if len(received) >= sender_count * message_count:
                complete.set()

    with open_context() as context, trio.fail_after(WAIT_S):
        left, right = pair(context, tmp_path, sndhwm=3, rcvhwm=3)
        async with left, right, trio.open_nursery() as receivers:
            receivers.start_soon(receive, left)
            # Traffic the other way: each side's calls may swallow its own other news.
            receivers.start_soon(keep_receiving, right)
            async with trio.open_nursery() as senders:
                for sender in range(sender_count):
                    senders.start_soon(send, right, sender)
                for _ in range(message_count):
                    await left.send(b"back")
            await complete.wait()
            receivers.cancel_scope.cancel()
    for sender in range(sender_count):
        own = [message for message in received if message.startswith(b"%d " % sender)]
        assert own == [b"%d %d" % (sender, number) for number in range(message_count)]


async def keep_receiving(socket: Socket) -> None:
    while True:
        await socket.recv()


async def test_nested_blocks_share_one_context_which_the_last_one_destroys() -> None:
    with open_context() as outer:
        with open_context() as inner:
            assert inner is outer
        assert not outer.closed
        left_open = outer.socket(zmq.DEALER)
    assert outer.closed
    assert left_open.closed
    with open_context() as later:
        assert later is not outer
