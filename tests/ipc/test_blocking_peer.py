"""`BlockingPeer`: frames to and from the scheduler for a loop without trio."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tidegate.ipc.blocking_peer import BlockingPeer
from tidegate.ipc.endpoints import EndpointError
from tidegate.ipc.link_options import FrameTooLargeError, LinkOptions, SendTimeoutError
from tidegate.ipc.protocol import FRAME_BYTES_MAX
from tidegate.ipc.zmq_context import Context, open_context

WAIT_MS = 10_000


@pytest.fixture
def context() -> Iterator[Context]:
    with open_context() as context:
        yield context


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link"


def serve(context: Context, endpoint: str) -> "zmq.Socket[bytes]":
    """The other side: a plain blocking ROUTER."""
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.rcvtimeo = WAIT_MS
    router.bind(endpoint)
    return router


def poll_until(peer: BlockingPeer, lost: bool) -> None:
    """Poll as a worker's loop does until the connection is lost, or up."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while (peer.lost if lost else peer.connected) is False:
        assert time.monotonic() < deadline
        peer.poll(1000)


def test_frames_go_both_ways_under_the_given_identity(context: Context, endpoint: str) -> None:
    with serve(context, endpoint) as router, BlockingPeer(context, endpoint, b"w-1") as peer:
        peer.send(b"hello")
        assert router.recv_multipart() == [b"w-1", b"hello"]
        for number in range(5):
            router.send_multipart([b"w-1", b"%d" % number])
        received: list[bytes] = []
        while len(received) < 5:
            assert peer.poll(WAIT_MS) or not received
            received += peer.receive_all()
        assert received == [b"%d" % number for number in range(5)]
        assert peer.receive_all() == []


def test_polling_ends_early_for_a_new_connection_and_else_at_its_time(
    context: Context, endpoint: str
) -> None:
    with serve(context, endpoint), BlockingPeer(context, endpoint, b"w-1") as peer:
        begin = time.monotonic()
        assert not peer.poll(WAIT_MS)
        assert time.monotonic() - begin < WAIT_MS / 2000
        begin = time.monotonic()
        assert not peer.poll(100)
        assert time.monotonic() - begin > 0.09
        assert peer.connected


def test_the_limit_bounds_what_is_received_at_a_time(context: Context, endpoint: str) -> None:
    with serve(context, endpoint) as router, BlockingPeer(context, endpoint, b"w-1") as peer:
        peer.send(b"hello")
        router.recv_multipart()
        for number in range(5):
            router.send_multipart([b"w-1", b"%d" % number])
        time.sleep(0.1)
        assert peer.receive_all(limit=3) == [b"0", b"1", b"2"]
        assert peer.receive_all(limit=3) == [b"3", b"4"]


def test_messages_of_several_frames_are_dropped_and_counted(
    context: Context, endpoint: str
) -> None:
    with serve(context, endpoint) as router, BlockingPeer(context, endpoint, b"w-1") as peer:
        peer.send(b"hello")
        router.recv_multipart()
        router.send_multipart([b"w-1", b"two", b"frames"])
        router.send_multipart([b"w-1", b"one"])
        frames: list[bytes] = []
        while not frames:
            peer.poll(WAIT_MS)
            frames = peer.receive_all()
        assert frames == [b"one"]
        assert peer.malformed_count == 1


def test_a_send_that_nobody_takes_fails_after_its_time(context: Context, endpoint: str) -> None:
    options = LinkOptions(send_frames_max=2)
    with BlockingPeer(context, endpoint, b"w-1", options, send_timeout_ms=50) as peer:
        peer.send(b"1")
        peer.send(b"2")
        with pytest.raises(SendTimeoutError, match=f"{endpoint} took no frame for 50 ms"):
            peer.send(b"3")
        assert not peer.connected
        assert not peer.lost


def test_a_lost_connection_ends_a_poll_at_once_and_is_remembered(
    context: Context, endpoint: str
) -> None:
    with BlockingPeer(context, endpoint, b"w-1") as peer:
        with serve(context, endpoint):
            poll_until(peer, lost=False)
            assert not peer.lost
        begin = time.monotonic()
        assert not peer.poll(WAIT_MS)
        assert time.monotonic() - begin < 1
        assert peer.lost
        assert not peer.connected
        with serve(context, endpoint):
            poll_until(peer, lost=False)
            assert peer.lost, "another scheduler does not know what this peer has"


def test_a_bad_endpoint_option_or_frame_is_refused_in_words(
    context: Context, endpoint: str
) -> None:
    with pytest.raises(EndpointError, match="'somewhere' is no endpoint"):
        BlockingPeer(context, "somewhere", b"w-1")
    with pytest.raises(AttributeError, match=r"(?i)no_such_option"):
        BlockingPeer(context, endpoint, b"w-1", LinkOptions(extra={"no_such_option": 1}))
    with BlockingPeer(context, endpoint, b"w-1") as peer, pytest.raises(FrameTooLargeError):
        peer.send(bytes(FRAME_BYTES_MAX + 1))


def test_closing_twice_is_allowed_and_a_linger_time_delivers(
    context: Context, endpoint: str
) -> None:
    with serve(context, endpoint) as router:
        peer = BlockingPeer(context, endpoint, b"w-1")
        peer.send(b"goodbye")
        peer.close(linger_ms=WAIT_MS)
        peer.close()
        assert router.recv_multipart() == [b"w-1", b"goodbye"]


def test_it_loads_no_trio() -> None:
    script = (
        "import sys, tidegate.ipc.blocking_peer;"
        "print([m for m in ('trio', 'torch', 'structlog') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr
