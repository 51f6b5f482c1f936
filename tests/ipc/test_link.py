"""`ServerLink`: slow, dead and malicious peers, and the others who notice nothing."""

import os
import random
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import zmq

from tidegate.ipc.endpoints import EndpointError
from tidegate.ipc.link import ServerLink
from tidegate.ipc.link_options import FrameTooLargeError, LinkOptions
from tidegate.ipc.outbox import OutboxBounds, SendOutcome
from tidegate.ipc.protocol import FRAME_BYTES_MAX
from tidegate.ipc.zmq_context import Context, SocketOption, open_context
from tidegate.ipc.zmq_trio import Socket

WAIT_S = 20  # Far more than anything here takes, so that a hang becomes a failure.
BIG = 50_000  # A few of these fill the kernel's buffer.


@asynccontextmanager
async def running_link(
    folder: Path,
    options: LinkOptions | None = None,
    bounds: OutboxBounds | None = None,
    malformed: list[str] | None = None,
) -> AsyncGenerator[tuple[Context, ServerLink]]:
    def note(peer: bytes, what: str) -> None:
        if malformed is not None:
            malformed.append(what)

    with open_context() as context, trio.fail_after(WAIT_S):
        link = ServerLink(context, f"ipc://{folder}/link", options, bounds, note)
        async with link, trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            yield context, link
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def greet(
    context: Context, link: ServerLink, name: str, **options: SocketOption
) -> AsyncGenerator[Socket]:
    """A new peer that the link knows."""
    async with Socket(context, zmq.DEALER, identity=name.encode(), **options) as peer:
        peer.connect(link.address)
        await peer.send(b"hello")
        assert await link.receive() == [(name.encode(), b"hello")]
        yield peer


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(5):
        while True:
            if holds():
                return
            await trio.sleep(0.002)


async def until_gone(link: ServerLink, peer: bytes) -> None:
    await until(lambda: link.send(peer, b"are you there?") is SendOutcome.GONE)


def number(frame: bytes) -> int:
    return int(frame[:6])


def numbered(value: int) -> bytes:
    """A frame of `BIG` bytes that begins with the number."""
    return (b"%06d" % value).ljust(BIG, b".")


async def test_frames_go_both_ways_in_order(tmp_path: Path) -> None:
    async with (
        running_link(tmp_path) as (context, link),
        greet(context, link, "a") as a,
        greet(context, link, "b") as b,
    ):
        for count in range(200):
            assert link.send(b"a", b"a%d" % count) is SendOutcome.SENT
            assert link.send(b"b", b"b%d" % count) is SendOutcome.SENT
        assert [await a.recv() for _ in range(200)] == [b"a%d" % n for n in range(200)]
        assert [await b.recv() for _ in range(200)] == [b"b%d" % n for n in range(200)]
        for count in range(200):
            await a.send(b"%d" % count)
        received: list[tuple[bytes, bytes]] = []
        while len(received) < 200:
            received += await link.receive()
        assert received == [(b"a", b"%d" % n) for n in range(200)]


async def test_a_slow_reader_is_told_of_at_its_bound_and_delays_nobody(tmp_path: Path) -> None:
    options = LinkOptions(send_frames_max=4)
    bounds = OutboxBounds(frame_count_max=10)
    sent = 0

    def is_full() -> bool:
        nonlocal sent
        outcome = link.send(b"slow", numbered(sent))
        sent += outcome is SendOutcome.SENT
        return outcome is SendOutcome.FULL

    async with (
        running_link(tmp_path, options, bounds) as (context, link),
        greet(context, link, "slow", rcvhwm=1) as slow,
        greet(context, link, "fast") as fast,
    ):
        await until(is_full)
        assert link.queued_byte_count == 10 * BIG
        assert (link.waiting_count(b"slow"), link.waiting_count(b"fast")) == (10, 0)
        for count in range(100):
            assert link.send(b"slow", b"turned away") is SendOutcome.FULL
            assert link.send(b"fast", b"%d" % count) is SendOutcome.SENT
            with trio.fail_after(1):
                assert await fast.recv() == b"%d" % count
        # It is served again when it has taken all that waited for it.
        assert [number(await slow.recv()) for _ in range(sent)] == list(range(sent))
        await until(lambda: link.queued_byte_count == 0)
        assert link.send(b"slow", b"again") is SendOutcome.SENT
        assert await slow.recv() == b"again"
        assert link.take_gone() == []


async def test_the_byte_bound_stops_a_slow_reader_too(tmp_path: Path) -> None:
    bounds = OutboxBounds(byte_count_max=5 * BIG, total_byte_count_max=20 * BIG)
    async with (
        running_link(tmp_path, LinkOptions(send_frames_max=4), bounds) as (context, link),
        greet(context, link, "slow", rcvhwm=1),
    ):
        await until(lambda: link.send(b"slow", bytes(BIG)) is SendOutcome.FULL)
        assert link.queued_byte_count == 5 * BIG
        assert link.discard(b"slow") == 5
        assert link.queued_byte_count == 0


async def test_queued_frames_keep_their_order_with_readers_of_any_pace(tmp_path: Path) -> None:
    chance = random.Random(1)
    count = 300
    names = ("a", "b", "c")

    async def read(peer: Socket, pause_s: float, received: list[int]) -> None:
        while len(received) < count:
            received.append(number(await peer.recv()))
            if chance.random() < 0.1:
                await trio.sleep(pause_s)

    async with (
        running_link(tmp_path, LinkOptions(send_frames_max=2)) as (context, link),
        greet(context, link, "a", rcvhwm=2) as a,
        greet(context, link, "b", rcvhwm=2) as b,
        greet(context, link, "c", rcvhwm=2) as c,
    ):
        received: dict[str, list[int]] = {name: [] for name in names}
        async with trio.open_nursery() as nursery:
            for name, peer, pause_s in zip(names, (a, b, c), (0, 0.002, 0.01), strict=True):
                nursery.start_soon(read, peer, pause_s, received[name])
            for value in range(count):
                for name in names:
                    assert link.send(name.encode(), numbered(value)) is SendOutcome.SENT
                if value % 10 == 0:
                    await trio.sleep(0.001)
        assert all(received[name] == list(range(count)) for name in names)


async def test_a_peer_that_went_away_is_gone(tmp_path: Path) -> None:
    async with running_link(tmp_path) as (context, link):
        assert link.send(b"stranger", b"x") is SendOutcome.GONE
        async with greet(context, link, "peer"):
            assert link.send(b"peer", b"x") is SendOutcome.SENT
        await until_gone(link, b"peer")
        assert link.take_gone() == []


async def test_a_peer_that_goes_while_frames_wait_for_it_is_reported_once(
    tmp_path: Path,
) -> None:
    def something_waits() -> bool:
        link.send(b"peer", bytes(BIG))
        return link.queued_byte_count > 0

    gone: list[bytes] = []

    def is_gone() -> bool:
        gone.extend(link.take_gone())
        return bool(gone)

    async with running_link(tmp_path, LinkOptions(send_frames_max=2)) as (context, link):
        async with greet(context, link, "peer", rcvhwm=1):
            await until(something_waits)
        await until(is_gone)
        assert link.queued_byte_count == 0
        await trio.sleep(0.05)
        assert link.take_gone() == []
        assert gone == [b"peer"]
        assert link.send(b"peer", b"x") is SendOutcome.GONE


async def test_a_peer_that_comes_back_under_its_identity_is_not_locked_out(
    tmp_path: Path,
) -> None:
    # Two connections under one name, as when the first is dead and has not been noticed.
    async with (
        running_link(tmp_path) as (context, link),
        greet(context, link, "peer") as first,
        greet(context, link, "peer") as second,
    ):
        assert link.send(b"peer", b"for the newer one") is SendOutcome.SENT
        assert await second.recv() == b"for the newer one"
        with trio.move_on_after(0.05) as scope:
            await first.recv()
        assert scope.cancelled_caught


async def test_every_kind_of_garbage_is_dropped_and_counted_and_service_goes_on(
    tmp_path: Path,
) -> None:
    chance = random.Random(0)
    garbage = [
        [b""],
        [b"", b""],
        [b"x"] * 50,
        [b"", b"x"],
        [b"x", b""],
        [bytes(1001)],
        *([chance.randbytes(chance.randrange(40)) for _ in range(3)] for _ in range(20)),
    ]
    expected_count = len(garbage) + 1  # With that of the REQ, which adds a frame of its own.
    malformed: list[str] = []
    options = LinkOptions(receive_bytes_max=1000, extra={"maxmsgsize": -1})
    async with (
        running_link(tmp_path, options, malformed=malformed) as (context, link),
        greet(context, link, "good") as good,
        Socket(context, zmq.DEALER, identity=b"bad") as bad,
        Socket(context, zmq.REQ) as asking,
    ):
        bad.connect(link.address)
        asking.connect(link.address)
        for parts in garbage:
            await bad.send_multipart(parts)
        await bad.send(b"the last")
        await asking.send(b"x")
        assert await link.receive() == [(b"bad", b"the last")]
        while link.malformed_count < expected_count:
            await good.send(b"ping")
            assert await link.receive() == [(b"good", b"ping")]
        assert link.malformed_count == len(malformed) == expected_count
        assert "an empty frame" in malformed
        assert "a frame of 1001 bytes" in malformed
        assert "a message of 50 frames instead of one" in malformed
        assert link.send(b"good", b"pong") is SendOutcome.SENT
        assert await good.recv() == b"pong"


async def test_random_bytes_of_one_frame_are_passed_on(tmp_path: Path) -> None:
    async with running_link(tmp_path) as (context, link), greet(context, link, "peer") as peer:
        frame = random.Random(0).randbytes(1000)
        await peer.send(frame)
        assert await link.receive() == [(b"peer", frame)]
        assert link.malformed_count == 0


async def test_a_frame_over_the_bound_ends_its_senders_connection_only(tmp_path: Path) -> None:
    async with (
        running_link(tmp_path, LinkOptions(receive_bytes_max=1000)) as (context, link),
        greet(context, link, "good") as good,
        greet(context, link, "bad", reconnect_ivl=10) as bad,
    ):
        await bad.send(bytes(1001))
        await until_gone(link, b"bad")
        await good.send(bytes(1000))
        assert await link.receive() == [(b"good", bytes(1000))]
        with trio.fail_after(5):  # It may come back, and behave.
            await bad.send(b"sorry")
            assert await link.receive() == [(b"bad", b"sorry")]


async def test_peers_that_do_not_speak_the_protocol_harm_nobody(tmp_path: Path) -> None:
    chance = random.Random(0)
    async with running_link(tmp_path) as (context, link), greet(context, link, "good") as good:
        path = link.address.removeprefix("ipc://")
        strangers = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for stranger in strangers:
            stranger.connect(path)
            # It begins like a newer peer's greeting, so that it cannot pass for an older.
            stranger.send(b"\xff" + chance.randbytes(chance.randrange(200)))
        for kind in (zmq.PUSH, zmq.PUB, zmq.SUB, zmq.ROUTER):
            other = context.socket(kind)
            other.linger = 0
            other.connect(link.address)
            other.close()
        await trio.sleep(0.05)
        for stranger in strangers:
            stranger.close()
        await good.send(b"ping")
        assert await link.receive() == [(b"good", b"ping")]
        assert link.send(b"good", b"pong") is SendOutcome.SENT
        assert await good.recv() == b"pong"


async def test_flush_waits_until_slow_readers_have_taken_what_waited(tmp_path: Path) -> None:
    async with (
        running_link(tmp_path, LinkOptions(send_frames_max=2)) as (context, link),
        greet(context, link, "peer", rcvhwm=2) as peer,
        trio.open_nursery() as nursery,
    ):
        for value in range(100):
            assert link.send(b"peer", numbered(value)) is SendOutcome.SENT
        assert not await link.flush(timeout_s=0.05), "nobody reads yet"
        flushed = trio.Event()

        async def flush() -> None:
            assert await link.flush(timeout_s=10)
            flushed.set()

        nursery.start_soon(flush)
        assert [number(await peer.recv()) for _ in range(100)] == list(range(100))
        await flushed.wait()


async def test_a_linger_time_lets_the_last_frames_out_and_leaves_no_file(
    tmp_path: Path,
) -> None:
    async with (
        running_link(tmp_path) as (context, link),
        greet(context, link, "peer") as peer,
    ):
        for value in range(50):
            assert link.send(b"peer", b"%d" % value) is SendOutcome.SENT
        link.close(linger_ms=5000)
        assert [int(await peer.recv()) for _ in range(50)] == list(range(50))
        assert os.listdir(tmp_path) == []


async def test_a_frame_that_no_receiver_takes_is_refused(tmp_path: Path) -> None:
    async with running_link(tmp_path) as (context, link), greet(context, link, "peer"):
        with pytest.raises(FrameTooLargeError, match=f"over the bound of {FRAME_BYTES_MAX}"):
            link.send(b"peer", bytes(FRAME_BYTES_MAX + 1))


async def test_a_second_server_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with running_link(tmp_path) as (context, link), greet(context, link, "peer") as peer:
        with pytest.raises(EndpointError, match=f"already in use by process {os.getpid()}"):
            ServerLink(context, link.address)
        assert link.send(b"peer", b"still here") is SendOutcome.SENT
        assert await peer.recv() == b"still here"


async def test_with_curve_keys_only_their_holders_are_heard(tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    own_public, own_secret = zmq.curve_keypair()
    server_keys: dict[str, SocketOption] = {
        "curve_server": 1,
        "curve_publickey": public,
        "curve_secretkey": secret,
    }
    own_keys: dict[str, SocketOption] = {
        "curve_serverkey": public,
        "curve_publickey": own_public,
        "curve_secretkey": own_secret,
    }
    async with (
        running_link(tmp_path, LinkOptions(extra=server_keys)) as (context, link),
        Socket(context, zmq.DEALER) as stranger,
    ):
        stranger.connect(link.address)
        await stranger.send(b"let me in")
        with trio.move_on_after(0.1) as scope:
            await link.receive()
        assert scope.cancelled_caught
        async with greet(context, link, "holder", **own_keys) as holder:
            assert link.send(b"holder", b"welcome") is SendOutcome.SENT
            assert await holder.recv() == b"welcome"
