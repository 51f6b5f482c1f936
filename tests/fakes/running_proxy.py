"""A proxy in this process, with real HTTP on a free port of this machine."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import trio

from fakes.fake_scheduler import FakeScheduler
from tidegate.clients.proxy.server import STATUS_OK, Stop, serve_proxy
from tidegate.clients.proxy.settings import ProxySettings
from tidegate.ipc.log import configure

READ_S_MAX = 10.0


class RunningProxy:
    """`http` sends requests to it; `status` is its exit status once it has ended."""

    def __init__(self, port: int, stop: Stop, http: httpx.AsyncClient, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.stop = stop
        self.http = http
        self.ended = trio.Event()
        self.status: int | None = None
        self._log = log

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    async def wait_ready(self) -> None:
        """Return when the model is known."""
        with trio.fail_after(READ_S_MAX):
            while True:
                if (await self.http.get("/v1/models")).status_code == 200:
                    return
                await trio.sleep(0.01)

    async def line_of(self, response: httpx.Response) -> dict[str, Any]:
        """The log line of a request, which is written after its response was sent."""
        name = response.headers["x-request-id"]
        with trio.fail_after(2):
            while True:
                for line in self.logged():
                    if line.get("http_id") == name and line["event"] == "http_request":
                        return line
                await trio.sleep(0.005)

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json=fields)

    async def chat(self, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=fields)

    async def stream(self, path: str, **fields: object) -> list[dict[str, Any]]:
        """All events of a stream, which must end with [DONE]."""
        body = json.dumps({**fields, "stream": True})
        headers = {"content-type": "application/json"}
        async with self.http.stream("POST", path, content=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The joined text of one choice of a completion's or a chat's stream."""
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    texts = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices]
    return "".join(texts)


@asynccontextmanager
async def open_proxy(
    scheduler: FakeScheduler, log: Path, settings: ProxySettings | None = None
) -> AsyncGenerator[RunningProxy]:
    """A proxy that is ready, unless the scheduler has no card."""
    settings = msgspec.structs.replace(
        settings or ProxySettings(), endpoint=scheduler.endpoint, port=0
    )
    stop, listening = Stop(), trio.Event()
    ports: list[int] = []

    def on_listening(port: int) -> None:
        ports.append(port)
        listening.set()

    async def run() -> None:
        status = await serve_proxy(
            settings, configure("proxy", str(log), "debug"), stop, on_listening
        )
        proxy.status = status
        proxy.ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await listening.wait()
        base = f"http://127.0.0.1:{ports[0]}"
        async with httpx.AsyncClient(base_url=base, timeout=READ_S_MAX) as http:
            proxy = RunningProxy(ports[0], stop, http, log)
            if scheduler.card is not None:
                await proxy.wait_ready()
            yield proxy
        stop.set(STATUS_OK)
        with trio.fail_after(5):
            await proxy.ended.wait()
