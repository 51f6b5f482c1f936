"""HTTP itself: clients that leave, do not read, send too much, or many at once."""

import json
import os
import re
import resource
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

import httpx
import pytest
import trio

from fakes.behaviours import answer, answer_and_hang, hang, ignore
from fakes.cards import card_of
from fakes.fake_scheduler import Behaviour, FakeRequest, FakeScheduler, open_fake_scheduler
from fakes.running_proxy import RunningProxy, open_proxy, text_of
from fakes.tiny_tokenizers import byte_level
from fakes.waiting import until
from tidegate.clients.proxy.cut import cut_connections
from tidegate.clients.proxy.server import raise_descriptor_limit
from tidegate.clients.proxy.settings import ProxySettings

MEBIBYTE = 1024 * 1024


def request_bytes(fields: dict[str, object], *headers: str) -> bytes:
    body = json.dumps(fields).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: test",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def connection(
    proxy: RunningProxy, receive_buffer: int | None = None
) -> AsyncGenerator[trio.SocketStream]:
    """A plain connection; a small receive buffer makes a client that reads slowly."""
    raw = trio.socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await raw.connect(("127.0.0.1", proxy.port))
    async with trio.SocketStream(raw) as stream:
        yield stream


async def read_to_end(stream: trio.SocketStream) -> bytes:
    return b"".join([chunk async for chunk in stream])


async def read_status(stream: trio.SocketStream) -> int:
    """The status of one response, which is read to its end."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += await stream.receive_some()
    head, _, body = received.partition(b"\r\n\r\n")
    match = re.search(rb"content-length: (\d+)", head)
    assert match is not None
    while len(body) < int(match[1]):
        body += await stream.receive_some()
    return int(head.split(b" ")[1])


# --- Clients that leave ---


@pytest.mark.parametrize("behaviour", [ignore, hang, answer_and_hang([65], [66])])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_cancels_in_every_phase(
    proxy: RunningProxy, scheduler: FakeScheduler, behaviour: Behaviour, stream: bool
) -> None:
    scheduler.behaviour = behaviour
    async with connection(proxy) as client:
        fields: dict[str, object] = {"prompt": "x", "max_tokens": 99, "stream": stream}
        await client.send_all(request_bytes(fields))
        await until(lambda: len(scheduler.requests) == 1)
        if stream and behaviour not in (ignore, hang):
            assert b"200" in await client.receive_some()
    with trio.fail_after(2):
        await scheduler.requests[0].cancelled.wait()
    assert (await proxy.http.get("/v1/models")).status_code == 200


async def test_leaving_cancels_every_choice(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.behaviour = answer_and_hang([65])
    async with connection(proxy) as client:
        prompts = [[1], [2], [3], [4]]
        fields: dict[str, object] = {"prompt": prompts, "max_tokens": 99, "stream": True}
        await client.send_all(request_bytes(fields))
        assert b"200" in await client.receive_some()
    await until(lambda: all(request.cancels for request in scheduler.requests))
    assert len(scheduler.requests) == 4


async def test_leaving_while_a_long_prompt_is_tokenised_submits_nothing(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    async with connection(proxy) as client:
        fields: dict[str, object] = {"prompt": "the cat sat " * 300_000, "max_tokens": 1}
        await client.send_all(request_bytes(fields))
        await trio.sleep(0.1)
    await until(lambda: "client_gone" in [line.get("outcome") for line in proxy.logged()], 2)
    assert not scheduler.requests


async def test_others_go_on_when_one_leaves(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.behaviour = answer(*[[65]] * 30, gap_s=0.005)
    texts: list[str] = []

    async def stay() -> None:
        events = await proxy.stream("/v1/completions", prompt="x", max_tokens=30)
        texts.append(text_of(events))

    async def leave() -> None:
        async with connection(proxy) as client:
            fields: dict[str, object] = {"prompt": "x", "max_tokens": 30, "stream": True}
            await client.send_all(request_bytes(fields))
            await client.receive_some()

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(stay)
            nursery.start_soon(leave)
    assert texts == [byte_level().decode([65] * 30)] * 4


# --- Clients that do not read ---


@asynccontextmanager
async def proxy_with_small_buffers(
    folder: Path, log: Path, stall_ms_max: int
) -> AsyncGenerator[tuple[FakeScheduler, RunningProxy]]:
    """A proxy whose connections keep little in the system, and a model of a long context."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    settings = ProxySettings(stall_ms_max=stall_ms_max, listen_fd=listener.detach())
    card = card_of(byte_level(), context=10**6)
    async with (
        open_fake_scheduler(folder, card) as scheduler,
        open_proxy(scheduler, log, settings) as proxy,
    ):
        yield scheduler, proxy


SLOW: dict[str, object] = {"prompt": "x", "max_tokens": 3000, "stream": True}


async def test_a_client_that_reads_nothing_is_cut_off_and_others_are_not(
    socket_folder: Path, tmp_path: Path
) -> None:
    async with proxy_with_small_buffers(socket_folder, tmp_path / "log", 400) as parts:
        scheduler, proxy = parts
        scheduler.behaviour = answer(*[[65] * 3] * 1000, gap_s=0.001)
        async with connection(proxy, receive_buffer=2048) as slow:
            await slow.send_all(request_bytes(SLOW))
            await until(lambda: len(scheduler.requests) == 1)
            scheduler.behaviour = answer([65, 65])
            while not scheduler.requests[0].cancels:
                began = trio.current_time()
                response = await proxy.complete(prompt="x", max_tokens=2)
                assert response.status_code == 200
                assert trio.current_time() - began < 2
                await trio.sleep(0.05)
            await until(
                lambda: "client_stalled" in [line.get("outcome") for line in proxy.logged()]
            )
            received = await read_to_end(slow)
            assert b"data: {" in received
            assert not received.endswith(b"0\r\n\r\n")  # It can tell that this is not all.


async def test_a_client_that_reads_slowly_loses_nothing(
    socket_folder: Path, tmp_path: Path
) -> None:
    async with proxy_with_small_buffers(socket_folder, tmp_path / "log", 5000) as parts:
        scheduler, proxy = parts
        scheduler.behaviour = answer(*[[65]] * 3000)
        async with connection(proxy, receive_buffer=2048) as slow:
            await slow.send_all(request_bytes(SLOW, "Connection: close"))
            await until(lambda: scheduler.requests != [] and scheduler.requests[0].is_over)
            await trio.sleep(0.3)
            received = await read_to_end(slow)
        lines = [line for line in received.decode().split("\n") if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert text_of(events) == byte_level().decode([65] * 3000)
        assert len(events) < 1000  # Tokens gathered while it did not read.
        assert "data: [DONE]" in received.decode()


async def test_stopping_does_not_wait_for_who_reads_nothing(
    socket_folder: Path, tmp_path: Path
) -> None:
    async with proxy_with_small_buffers(socket_folder, tmp_path / "log", 60_000) as parts:
        scheduler, proxy = parts
        scheduler.behaviour = answer(*[[65] * 30] * 100)
        async with connection(proxy, receive_buffer=2048) as slow:
            await slow.send_all(request_bytes(SLOW))
            await until(lambda: scheduler.requests != [] and scheduler.requests[0].is_over)
            proxy.stop.set(0)
            with trio.fail_after(3):
                await proxy.ended.wait()


async def test_cutting_finds_one_client_among_others() -> None:
    listener = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listener[0].socket.getsockname()[1]
    clients = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
    accepted = [await listener[0].accept() for _ in clients]
    before = len(os.listdir("/proc/self/fd"))
    address = clients[1].socket.getsockname()
    assert cut_connections(port, (address[0], address[1])) == 1
    assert await clients[1].receive_some() == b""
    await accepted[0].send_all(b"x")
    assert await clients[0].receive_some() == b"x"
    assert cut_connections(port) == 3
    assert await clients[0].receive_some() == b""
    assert len(os.listdir("/proc/self/fd")) == before
    for stream in (*clients, *accepted, *listener):
        await stream.aclose()


# --- Bodies ---


async def test_bodies_of_all_requests_have_a_bound_together(
    scheduler: FakeScheduler, tmp_path: Path
) -> None:
    settings = ProxySettings(body_bytes_max=1000, body_bytes_total_max=1500)
    async with (
        open_proxy(scheduler, tmp_path / "log", settings) as proxy,
        connection(proxy) as half,
    ):
        whole = request_bytes({"prompt": "x", "max_tokens": 1, "user": "u" * 850})
        await half.send_all(whole[:-1])
        await trio.sleep(0.05)
        response = await proxy.complete(prompt="x", max_tokens=1, user="u" * 800)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "overloaded"
        await half.send_all(whole[-1:])
        assert b"HTTP/1.1 200" in await half.receive_some()
        response = await proxy.complete(prompt="x", max_tokens=1, user="u" * 800)
        assert response.status_code == 200


async def test_a_body_that_stops_half_way_times_out(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.clients.proxy.exchange.BODY_MS_MAX", 50)
    monkeypatch.setattr("tidegate.clients.proxy.exchange.DRAIN_MS_MAX", 50)
    async with connection(proxy) as client:
        await client.send_all(request_bytes({"prompt": "x"})[:-3])
        answer_bytes = await read_to_end(client)
    assert b"408" in answer_bytes
    assert b"body_too_slow" in answer_bytes


async def test_a_long_prompt_does_not_hold_up_others(proxy: RunningProxy) -> None:
    worst = 0.0

    async def poll() -> None:
        nonlocal worst
        while True:
            began = trio.current_time()
            assert (await proxy.http.get("/health")).status_code == 200
            worst = max(worst, trio.current_time() - began)
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll)
        response = await proxy.complete(prompt="the cat sat on " * 200_000, max_tokens=1)
        nursery.cancel_scope.cancel()
    assert response.status_code == 400
    assert worst < 1


# --- Connections ---


async def test_pipelined_requests_are_answered_in_order(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    both = request_bytes({"prompt": "x", "max_tokens": 40}) + request_bytes(
        {"prompt": "x", "max_tokens": 1}, "Connection: close"
    )
    async with connection(proxy) as client:
        await client.send_all(both)
        received = (await read_to_end(client)).decode()
    assert received.count("HTTP/1.1 200") == 2
    assert re.findall(r'"completion_tokens":(\d+)', received) == ["40", "1"]
    assert [request.max_tokens for request in scheduler.requests] == [40, 1]


async def test_a_connection_is_usable_after_bad_requests(proxy: RunningProxy) -> None:
    async with connection(proxy) as client:
        for fields, status in (({"prompt": 5}, 400), ({"prompt": "x", "model": "y"}, 404)) * 3:
            await client.send_all(request_bytes(dict(fields)))
            assert await read_status(client) == status
        await client.send_all(request_bytes({"prompt": "x", "max_tokens": 1}))
        assert await read_status(client) == 200


async def test_garbage_on_the_port_does_no_harm(proxy: RunningProxy) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\0" * 70_000, b""):
        async with connection(proxy) as client:
            with suppress(trio.BrokenResourceError):
                await client.send_all(garbage)
                with trio.move_on_after(0.1):
                    await read_to_end(client)
    assert (await proxy.complete(prompt="x", max_tokens=1)).status_code == 200
    assert not [line for line in proxy.logged() if line["event"] == "internal_error"]


async def test_a_websocket_is_turned_away(proxy: RunningProxy) -> None:
    lines = [
        "GET /v1/completions HTTP/1.1",
        "Host: test",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "",
        "",
    ]
    async with connection(proxy) as client:
        await client.send_all("\r\n".join(lines).encode())
        assert b"403" in (await client.receive_some()).split(b"\r\n")[0]
    assert (await proxy.complete(prompt="x", max_tokens=1)).status_code == 200


async def test_the_same_id_given_by_clients_does_not_mix_requests(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    async def behave(request: FakeRequest) -> None:
        await answer(*[[request.prompt[0]]] * 5, gap_s=0.005)(request)

    scheduler.behaviour = behave
    texts: dict[int, str] = {}

    async def ask(token_id: int) -> None:
        response = await proxy.http.post(
            "/v1/completions",
            json={"prompt": [token_id], "max_tokens": 5, "request_id": "same"},
            headers={"x-request-id": "same"},
        )
        texts[token_id] = response.json()["choices"][0]["text"]

    async with trio.open_nursery() as nursery:
        for token_id in range(60, 70):
            nursery.start_soon(ask, token_id)
    assert texts == {i: byte_level().decode([i] * 5) for i in range(60, 70)}


async def test_a_bound_on_requests_at_a_time(scheduler: FakeScheduler, tmp_path: Path) -> None:
    scheduler.behaviour = hang
    settings = ProxySettings(request_count_max=2)
    async with (
        open_proxy(scheduler, tmp_path / "log", settings) as proxy,
        trio.open_nursery() as nursery,
    ):
        for _ in range(2):
            nursery.start_soon(partial(proxy.complete, prompt="x"))
        await until(lambda: len(scheduler.requests) == 2)
        response = await proxy.complete(prompt="x")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        nursery.cancel_scope.cancel()


async def test_a_thousand_connections_at_once(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    count = 1100
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit()
    before = len(os.listdir("/proc/self/fd"))
    statuses: list[bytes] = []
    everyone_is_there = trio.Event()
    connected = 0

    async def ask() -> None:
        nonlocal connected
        async with connection(proxy) as client:
            connected += 1
            if connected == count:
                everyone_is_there.set()
            await everyone_is_there.wait()
            await client.send_all(
                request_bytes({"prompt": "x", "max_tokens": 2}, "Connection: close")
            )
            statuses.append((await read_to_end(client)).split(b" ")[1])

    try:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(ask)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert statuses == [b"200"] * count
    assert (await proxy.complete(prompt="x", max_tokens=1)).status_code == 200


async def test_health_is_quick_under_load(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.behaviour = answer(*[[65]] * 64, gap_s=0.01)
    times: list[float] = []
    loaded = trio.current_time()

    async def poll() -> None:
        while True:
            began = trio.current_time()
            assert (await proxy.http.get("/health")).status_code == 200
            times.append(trio.current_time() - began)
            await trio.sleep(0.02)

    async with trio.open_nursery() as poller:
        poller.start_soon(poll)
        async with (
            httpx.AsyncClient(
                base_url=proxy.url, timeout=30, limits=httpx.Limits(max_connections=100)
            ) as http,
            trio.open_nursery() as nursery,
        ):
            body = {"prompt": "x", "max_tokens": 64, "stream": True}
            for _ in range(64):
                nursery.start_soon(partial(http.post, "/v1/completions", json=body))
        poller.cancel_scope.cancel()
    # As a share, since a busy machine makes both slower. Health waits for no stream to end.
    assert median(times) < (trio.current_time() - loaded) / 5
    assert max(times) < 5
