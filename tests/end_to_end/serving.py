"""A real server for tests: `tidegate serve` in its own processes, on a free port."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_S_MAX = 120.0
STOP_S_MAX = 10.0


@dataclass
class Server:
    """A running server. `log` is its JSON-lines file, `folder` its run directory."""

    process: "subprocess.Popen[bytes]"
    model: str
    port: int
    folder: Path
    log: Path
    output: Path
    options: tuple[str, ...] = field(default=())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        """Where the client library connects."""
        return f"ipc://{self.folder}/clients.sock"

    def lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """The log's lines, or those of one event. Every line must be a JSON object."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if event in (None, line["event"])]

    def pids(self) -> dict[str, int]:
        """The process ids of the server's parts, by the names that they log under."""
        return {line["process"]: line["pid"] for line in self.lines("process_started")}

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health", timeout=30).json())

    def free_pages(self) -> list[tuple[int, int]]:
        """(free, total) of every pool."""
        pools = self.health()["pools"]
        return [(pool["free_count"], pool["page_count"]) for pool in pools]

    def wait_until_all_pages_are_free(self, timeout_s: float = 20.0) -> None:
        def all_free() -> bool:
            return all(free == total for free, total in self.free_pages())

        wait_until(all_free, timeout_s, "pages are still held")

    def printed(self) -> str:
        return self.output.read_text()

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Ask it to stop, and return its exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(STOP_S_MAX)


def wait_until(condition: Callable[[], bool], timeout_s: float, text: str) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, text
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet collected does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(model: str, *options: str) -> Generator[Server]:
    """Start a server, wait until it is ready, and stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="tidegate-test-") as name:
        folder = Path(name)
        server = start(model, folder, *options)
        try:
            wait_ready(server)
            yield server
        finally:
            if server.process.poll() is None:
                server.process.terminate()
                try:
                    server.process.wait(STOP_S_MAX)
                except subprocess.TimeoutExpired:
                    for pid in server.pids().values():
                        if is_alive(pid):
                            os.kill(pid, signal.SIGKILL)
                    server.process.kill()
                    raise


def start(model: str, folder: Path, *options: str) -> Server:
    """Start a server with its files in `folder`, and do not wait."""
    port = free_port()
    run = folder / "run"
    log, output = folder / "log.jsonl", folder / "output.txt"
    command = (
        sys.executable,
        "-m",
        "tidegate",
        "serve",
        model,
        "--port",
        str(port),
        "--run-dir",
        str(run),
        "--log",
        str(log),
        *options,
    )
    with output.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    return Server(process, model, port, run, log, output, options)


def wait_ready(server: Server) -> None:
    end = time.monotonic() + START_S_MAX
    while True:
        assert server.process.poll() is None, f"it ended: {server.printed()}"
        assert time.monotonic() < end, f"it is not ready: {server.printed()}"
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
