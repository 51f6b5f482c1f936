"""`PeerLink`: one connection to the scheduler, used by tasks."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq

from tidegate.ipc.endpoints import EndpointError
from tidegate.ipc.link import ServerLink
from tidegate.ipc.link_options import FrameTooLargeError, LinkOptions
from tidegate.ipc.outbox import SendOutcome
from tidegate.ipc.peer_link import PeerLink, random_identity
from tidegate.ipc.protocol import FRAME_BYTES_MAX
from tidegate.ipc.zmq_context import open_context
from tidegate.ipc.zmq_trio import Socket

WAIT_S = 20


def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/link"


async def test_frames_go_both_ways(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        async with (
            ServerLink(context, endpoint(tmp_path)) as server,
            PeerLink(context, endpoint(tmp_path)) as peer,
        ):
            await peer.send(b"to the scheduler")
            assert await server.receive() == [(peer.identity, b"to the scheduler")]
            assert server.send(peer.identity, b"to the peer") is SendOutcome.SENT
            assert await peer.receive() == [b"to the peer"]


async def test_frames_that_arrived_together_are_received_together(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        async with (
            ServerLink(context, endpoint(tmp_path)) as server,
            PeerLink(context, endpoint(tmp_path)) as peer,
        ):
            await peer.send(b"hello")
            await server.receive()
            for number in range(10):
                server.send(peer.identity, b"%d" % number)
            await trio.sleep(0.1)
            assert await peer.receive() == [b"%d" % number for number in range(10)]


async def test_a_peer_may_connect_before_the_scheduler_is_there(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        async with PeerLink(context, endpoint(tmp_path)) as peer:
            await peer.send(b"early")
            with trio.move_on_after(0.05) as scope:
                await peer.wait_connected()
            assert scope.cancelled_caught
            async with ServerLink(context, endpoint(tmp_path)) as server:
                await peer.wait_connected()
                assert await server.receive() == [(peer.identity, b"early")]


async def test_a_restarted_scheduler_is_found_again_under_the_same_identity(
    tmp_path: Path,
) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        async with PeerLink(context, endpoint(tmp_path)) as peer:
            for _ in range(3):
                async with ServerLink(context, endpoint(tmp_path)) as server:
                    await peer.wait_connected()
                    await peer.send(b"hello")
                    assert await server.receive() == [(peer.identity, b"hello")]
                with trio.fail_after(1):
                    await peer.wait_disconnected()


async def test_sending_waits_while_nobody_takes_frames(tmp_path: Path) -> None:
    options = LinkOptions(send_frames_max=3)
    with open_context() as context, trio.fail_after(WAIT_S):
        async with PeerLink(context, endpoint(tmp_path), options) as peer:
            for number in range(3):
                peer.send_nowait(b"%d" % number)
            with pytest.raises(trio.WouldBlock):
                peer.send_nowait(b"no room")
            with trio.move_on_after(0.05) as scope:
                await peer.send(b"no room either")
            assert scope.cancelled_caught
            async with ServerLink(context, endpoint(tmp_path)) as server:
                await peer.send(b"3")
                frames: list[bytes] = []
                while len(frames) < 4:
                    frames += [frame for _, frame in await server.receive()]
                assert frames == [b"0", b"1", b"2", b"3"]


async def test_messages_of_several_frames_are_dropped_and_counted(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        async with (
            Socket(context, zmq.ROUTER) as server,
            PeerLink(context, endpoint(tmp_path)) as peer,
        ):
            server.bind(endpoint(tmp_path))
            await peer.send(b"hello")
            await server.recv_multipart()
            await server.send_multipart([peer.identity, b"two", b"frames"])
            await server.send_multipart([peer.identity, b"one"])
            assert await peer.receive() == [b"one"]
            assert peer.malformed_count == 1


async def test_closing_wakes_every_task_that_waits(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(WAIT_S):
        peer = PeerLink(context, endpoint(tmp_path))
        ended: list[str] = []

        async def wait(name: str, call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(trio.ClosedResourceError):
                await call()
            ended.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, "receive", peer.receive)
            nursery.start_soon(wait, "connected", peer.wait_connected)
            nursery.start_soon(wait, "disconnected", peer.wait_disconnected)
            await trio.testing.wait_all_tasks_blocked()
            peer.close()
            peer.close()
        assert sorted(ended) == ["connected", "disconnected", "receive"]
        with pytest.raises(trio.ClosedResourceError):
            await peer.send(b"x")


async def test_a_bad_endpoint_or_frame_is_refused_in_words(tmp_path: Path) -> None:
    with open_context() as context:
        with pytest.raises(EndpointError, match="'somewhere' is no endpoint"):
            PeerLink(context, "somewhere")
        with pytest.raises(EndpointError, match="may have 107; choose a shorter folder"):
            PeerLink(context, f"ipc:///{'x' * 200}")
        async with PeerLink(context, endpoint(tmp_path)) as peer:
            with pytest.raises(FrameTooLargeError):
                await peer.send(bytes(FRAME_BYTES_MAX + 1))
            with pytest.raises(FrameTooLargeError):
                peer.send_nowait(bytes(FRAME_BYTES_MAX + 1))


def test_identities_are_all_different_and_allowed() -> None:
    identities = {random_identity() for _ in range(1000)}
    assert len(identities) == 1000
    assert all(0 < len(i) <= 255 and i[0] != 0 for i in identities)
