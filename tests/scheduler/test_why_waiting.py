"""The shell's answers to `WhyWaiting`, over a real socket to a real client."""

import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tidegate.clients.library import AsyncClient, Waiting, WaitKind
from tidegate.ipc.endpoints import ipc_endpoint
from tidegate.ipc.link import ServerLink
from tidegate.ipc.log import Log
from tidegate.ipc.peer_link import PeerLink
from tidegate.ipc.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    EndReason,
    Fingerprint,
    Finished,
    Hello,
    ModelCard,
    PageHolder,
    Phase,
    PoolHandle,
    RequestId,
    Role,
    Sampling,
    SchedulerToClient,
    Submit,
    WhyWaiting,
    WorkerId,
    decode_for_client,
    encode,
    pack_ids,
)
from tidegate.ipc.zmq_context import open_context
from tidegate.kvcache.layout import All, Group, Layout, TensorSpec, Tokens
from tidegate.scheduler.core import Core
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.shell import Shell, ShellSettings

LAYOUT = Layout(
    (Group("full", All(), Tokens(4), (TensorSpec("k", 0, (1,), "float32"),)),), None
)
CARD = ModelCard("tiny", "llama", 100, 64, b"{}", None, None, False, (1,))
HELLO = Hello(
    PROTOCOL_VERSION,
    WorkerId("w"),
    Role.BOTH,
    1,
    Fingerprint("m", "float32", LAYOUT),
    CARD,
    PoolHandle("shared_memory", "1:2", 0, (8,)),
    4,
)


@asynccontextmanager
async def scheduler_at(folder: Path, log: Log) -> AsyncGenerator[str]:
    """A scheduler with one worker, which never answers; the endpoint for clients."""
    workers, clients = (ipc_endpoint(folder, f"{name}.sock") for name in ("w", "c"))
    core = Core(CoreSettings(chunk_tokens=Tokens(8)))
    with open_context() as context:
        async with (
            ServerLink(context, workers) as worker_link,
            ServerLink(context, clients) as client_link,
            trio.open_nursery() as nursery,
        ):
            shell = Shell(
                core,
                worker_link,
                client_link,
                log,
                ShellSettings(),
                "e",
                random.Random(0),
                b"s",
            )
            for run in (worker_link.run, client_link.run, shell.run):
                nursery.start_soon(run)
            worker = PeerLink(context, workers)
            await worker.wait_connected()
            await worker.send(encode(HELLO))
            while not core.fleet.workers:
                await worker.receive()
            yield clients
            worker.close(0)
            nursery.cancel_scope.cancel()


async def ask_raw(endpoint: str, name: str) -> Waiting:
    """What a connection of its own is answered about a request of this name."""
    with open_context() as context:
        link = PeerLink(context, endpoint)
        await link.wait_connected()
        await link.send(encode(WhyWaiting(RequestId(name))))
        (frame,) = await link.receive()
        link.close(0)
    found = decode_for_client(frame)
    assert isinstance(found, Waiting)
    return found


async def test_each_request_of_a_connection_is_told_what_it_waits_for(
    tmp_path: Path, log: Log
) -> None:
    options = {"max_tokens": 9, "detokenise": False}
    with trio.fail_after(10):
        async with scheduler_at(tmp_path, log) as endpoint, AsyncClient(endpoint) as client:
            first, second, third = (client.generate([5] * 18, **options) for _ in range(3))  # type: ignore[arg-type]
            for generation in (first, second, third):
                await generation.start()
            found = await first.why_waiting()
            assert (found.request_id, found.phase) == ("e-1", Phase.PREFILLING)
            assert (found.kind, found.worker) == (WaitKind.ANSWER, "w")
            # Five pages for 19 positions, and one for the row that may grow.
            found = await second.why_waiting()
            assert (found.request_id, found.kind) == ("e-2", WaitKind.PAGES)
            assert (found.pool, found.pages_short, found.pages_needed) == ("full", 3, 6)
            assert found.holders == (PageHolder(RequestId("e-1"), 5),)
            behind = await third.why_waiting()
            assert (behind.kind, behind.ahead, behind.first) == (WaitKind.TURN, 1, "e-2")
            assert behind.text == f"e-3 waits in the queue, behind 1 other; {found.text}"
            first.close()
            found = await second.why_waiting()
            assert (found.kind, found.pages_draining) == (WaitKind.DRAINING, 5)


@pytest.mark.parametrize("name", ["1", "none", "x" * 1000])
async def test_a_request_of_another_connection_is_unknown(
    tmp_path: Path, log: Log, name: str
) -> None:
    with trio.fail_after(10):
        async with scheduler_at(tmp_path, log) as endpoint, AsyncClient(endpoint) as client:
            await client.generate([5], max_tokens=9, detokenise=False).start()
            found = await ask_raw(endpoint, name)
    assert (found.request_id, found.phase, found.kind) == (name[:256], None, WaitKind.NOTHING)
    assert found.text == (
        f"no request {name[:256]!r} is alive on this connection; it may have ended"
    )


async def test_a_request_is_known_from_its_first_frame_to_its_last(
    tmp_path: Path, log: Log
) -> None:
    name = RequestId("mine")
    ask = encode(WhyWaiting(name))

    async def two_answers(frame: bytes) -> list[SchedulerToClient]:
        await link.send(frame)
        await link.send(ask)
        frames: list[bytes] = []
        while len(frames) < 2:
            frames += await link.receive()
        return [decode_for_client(frame) for frame in frames]

    with trio.fail_after(10), open_context() as context:
        async with scheduler_at(tmp_path, log) as endpoint:
            link = PeerLink(context, endpoint)
            await link.wait_connected()
            submit = Submit(name, "", pack_ids([5]), 9, Sampling(), 7)
            accepted, why = await two_answers(encode(submit))
            assert isinstance(accepted, Accepted) and isinstance(why, Waiting)
            assert (why.request_id, why.kind) == (name, WaitKind.ANSWER)
            cancel = Cancel(name, 0, EndReason.CANCELLED)
            finished, why = await two_answers(encode(cancel))
            assert isinstance(finished, Finished) and isinstance(why, Waiting)
            assert (why.request_id, why.kind) == (name, WaitKind.NOTHING)
            link.close(0)
