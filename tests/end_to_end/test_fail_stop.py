"""The end of any process ends the whole server, and nothing of it is left."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from end_to_end.serving import Server, is_alive, start, wait_ready, wait_until

END_S_MAX = 3.0
PROCESSES = ("scheduler", "prefill-0", "decode-0", "proxy")


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="tidegate-test-") as name:
        server = start("smollm2-135m", Path(name))
        wait_ready(server)
        try:
            yield server
        finally:
            for pid in (server.process.pid, *server.pids().values()):
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
            server.process.wait()


class Reader:
    """Reads one stream in a thread, to its end."""

    def __init__(self, server: Server) -> None:
        self.events: list[str] = []
        self.is_cut = False
        self._url = f"{server.url}/v1/completions"
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        body = {
            "model": "smollm2-135m",
            "prompt": "Once upon a time",
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with httpx.stream("POST", self._url, json=body, timeout=30) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
        except httpx.TransportError:
            self.is_cut = True


def streaming(server: Server, count: int) -> list[Reader]:
    """Streams that have brought some tokens and are far from their end."""
    readers = [Reader(server) for _ in range(count)]
    wait_until(
        lambda: all(len(reader.events) > 3 for reader in readers), 60, "streams do not begin"
    )
    return readers


def check_gone(server: Server, pids: dict[str, int]) -> None:
    assert not any(is_alive(pid) for pid in pids.values()), pids
    assert not list(server.folder.glob("*.sock")) if server.folder.exists() else True
    assert not [name for name in os.listdir("/dev/shm") if "tidegate" in name]


@pytest.mark.parametrize("victim", PROCESSES)
def test_killing_any_process_ends_all_within_three_seconds(server: Server, victim: str) -> None:
    pids = server.pids()
    assert set(PROCESSES) <= set(pids)
    readers = streaming(server, 3)
    begin = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    status = server.process.wait(10)
    assert time.monotonic() - begin < END_S_MAX
    assert status not in (0, -signal.SIGKILL)
    check_gone(server, pids)
    for reader in readers:
        reader.thread.join(5)
        assert not reader.thread.is_alive()
        if victim == "proxy":
            # Nobody is left who could write an event: the connection breaks.
            assert reader.is_cut
            continue
        assert '"error"' in reader.events[-1]
        assert not any('"finish_reason":"' in event for event in reader.events)
    assert victim.split("-")[0] in server.printed()


def test_killing_the_parent_leaves_nothing_running(server: Server) -> None:
    pids = server.pids()
    readers = streaming(server, 2)
    server.process.kill()
    server.process.wait()
    wait_until(
        lambda: not any(is_alive(pid) for pid in pids.values()), END_S_MAX, "a child lives on"
    )
    check_gone(server, pids)
    for reader in readers:
        reader.thread.join(5)
        assert not reader.thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_in_order(server: Server, number: signal.Signals) -> None:
    pids = server.pids()
    readers = streaming(server, 2)
    begin = time.monotonic()
    status = server.stop(number)
    assert time.monotonic() - begin < END_S_MAX
    assert status == 0
    check_gone(server, pids)
    for reader in readers:
        reader.thread.join(5)
        assert '"error"' in reader.events[-1]


def test_an_occupied_port_is_told_in_one_line_and_starts_nothing(
    server: Server, tmp_path: Path
) -> None:
    second = start("smollm2-135m", tmp_path, "--port", str(server.port))
    assert second.process.wait(20) not in (0, None)
    lines = second.printed().strip().splitlines()
    assert len(lines) == 1
    assert str(server.port) in lines[0]
    assert server.process.poll() is None
