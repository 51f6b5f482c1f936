"""The proxy as a process: signals, its parent's end, and what keeps it from starting."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import trio

from fakes.behaviours import answer_and_hang
from fakes.fake_scheduler import FakeScheduler
from fakes.waiting import until
from tidegate.clients.proxy.server import STATUS_LOST, STATUS_NOT_STARTED, STATUS_OK

FIELDS = {"prompt": "x", "max_tokens": 9, "stream": True}
HUGE_BYTES = 64 * 1024 * 1024
CODE = """
import json, pathlib, sys
from tidegate.clients.proxy.server import run_proxy
from tidegate.clients.proxy.settings import ProxySettings
settings = json.loads(sys.argv[1])
log = pathlib.Path(settings.pop("log"))
sys.exit(run_proxy(ProxySettings(log=log, **settings)))
"""


@contextmanager
def started(
    pass_fds: tuple[int, ...] = (), **settings: object
) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, json.dumps(settings)],
        pass_fds=pass_fds,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def listening() -> tuple[socket.socket, int]:
    """A socket that is bound already, as `tidegate serve` hands it down."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


async def exit_status(process: subprocess.Popen[str], seconds: float) -> int:
    with trio.fail_after(seconds):
        while True:
            status = process.poll()
            if status is not None:
                return status
            await trio.sleep(0.01)


def log_lines(folder: Path) -> list[str]:
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []


async def wait_ready(http: httpx.AsyncClient) -> None:
    with trio.fail_after(10):
        while True:
            if (await http.get("/health")).status_code == 200:
                return
            await trio.sleep(0.05)


async def read_stream(port: int, began: trio.Event, lines: list[str]) -> None:
    """Stream from a proxy that may still be starting."""
    async with httpx.AsyncClient(timeout=10, base_url=f"http://127.0.0.1:{port}") as http:
        await wait_ready(http)
        async with http.stream("POST", "/v1/completions", json=FIELDS) as response:
            async for line in response.aiter_lines():
                if line:
                    lines.append(line)
                    began.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_order(
    scheduler: FakeScheduler, tmp_path: Path, number: signal.Signals
) -> None:
    scheduler.behaviour = answer_and_hang([65])
    listener, port = listening()
    began, lines = trio.Event(), list[str]()
    settings = {
        "endpoint": scheduler.endpoint,
        "listen_fd": listener.fileno(),
        "log": str(tmp_path / "log"),
    }
    with started((listener.fileno(),), **settings) as process:
        listener.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_stream, port, began, lines)
            await began.wait()
            process.send_signal(number)
            assert await exit_status(process, 3) == STATUS_OK
        assert "shutting_down" in lines[-1]
    events = [json.loads(line)["event"] for line in log_lines(tmp_path)]
    assert events[0] == "process_started"
    assert events[-1] == "process_stopped"


async def test_the_end_of_the_scheduler_ends_it(
    scheduler: FakeScheduler, tmp_path: Path
) -> None:
    scheduler.behaviour = answer_and_hang([65])
    listener, port = listening()
    began, lines = trio.Event(), list[str]()
    settings = {
        "endpoint": scheduler.endpoint,
        "listen_fd": listener.fileno(),
        "log": str(tmp_path / "log"),
    }
    with started((listener.fileno(),), **settings) as process:
        listener.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_stream, port, began, lines)
            await began.wait()
            scheduler.close()
            assert await exit_status(process, 3) == STATUS_LOST
        assert "server_lost" in lines[-1]


async def test_the_end_of_the_parent_ends_it(scheduler: FakeScheduler, tmp_path: Path) -> None:
    scheduler.behaviour = answer_and_hang([65])
    listener, port = listening()
    read_end, write_end = os.pipe()
    began, lines = trio.Event(), list[str]()
    settings = {
        "endpoint": scheduler.endpoint,
        "listen_fd": listener.fileno(),
        "lifeline_fd": read_end,
        "log": str(tmp_path / "log"),
    }
    with started((listener.fileno(), read_end), **settings) as process:
        listener.close()
        os.close(read_end)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_stream, port, began, lines)
            await began.wait()
            os.close(write_end)
            assert await exit_status(process, 3) == STATUS_LOST
        assert "shutting_down" in lines[-1]


async def test_a_signal_ends_it_while_it_waits_for_the_scheduler(tmp_path: Path) -> None:
    endpoint, log = f"ipc://{tmp_path}/none.sock", str(tmp_path / "log")
    with started(endpoint=endpoint, port=0, log=log) as process:
        await until(lambda: "process_started" in "".join(log_lines(tmp_path)), 10)
        await trio.sleep(0.1)
        process.terminate()
        assert await exit_status(process, 2) == STATUS_OK


def resident_bytes(process: subprocess.Popen[str]) -> int:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_huge_body_is_refused_without_being_kept(
    scheduler: FakeScheduler, tmp_path: Path, chunked: bool
) -> None:
    async def pieces() -> AsyncGenerator[bytes]:
        yield b'{"prompt":"'
        for _ in range(HUGE_BYTES // 65536):
            yield b"x" * 65536

    headers = {"content-type": "application/json"}
    if not chunked:
        headers["content-length"] = str(HUGE_BYTES + 11)
    listener, port = listening()
    settings = {
        "endpoint": scheduler.endpoint,
        "listen_fd": listener.fileno(),
        "log": str(tmp_path / "log"),
    }
    with started((listener.fileno(),), **settings) as process:
        listener.close()
        base = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(timeout=30, base_url=base) as http:
            await wait_ready(http)
            before = resident_bytes(process)
            response = await http.post("/v1/completions", content=pieces(), headers=headers)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
            assert resident_bytes(process) - before < 24 * 1024 * 1024
            assert (await http.get("/v1/models")).status_code == 200
    assert not scheduler.requests


async def test_what_keeps_it_from_starting_is_told(
    scheduler: FakeScheduler, tmp_path: Path
) -> None:
    listener, port = listening()
    log = str(tmp_path / "log")
    with started(endpoint=scheduler.endpoint, port=port, log=log) as process:
        assert await exit_status(process, 10) == STATUS_NOT_STARTED
        assert process.stderr is not None
        last = process.stderr.read().splitlines()[-1]
        assert "in use" in last
        assert str(port) in last
    listener.close()
    endpoint = f"ipc://{tmp_path}/none.sock"
    with started(endpoint=endpoint, port=0, connect_ms_max=100, log=log) as process:
        assert await exit_status(process, 10) == STATUS_NOT_STARTED
        assert process.stderr is not None
        assert endpoint in process.stderr.read().splitlines()[-1]
