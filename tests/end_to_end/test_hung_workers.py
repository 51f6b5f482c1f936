"""Workers that make no progress any more: their requests run elsewhere, or end in time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from end_to_end.serving import Server, serve, wait_until
from tidegate import Client
from tidegate.clients.library import ClientError, Result

STALL_S = 4.0
FENCE_S = 1.0
OPTIONS = ("--stall-timeout", str(STALL_S), "--fence-timeout", str(FENCE_S))
MARGIN_S = 3.0  # On a busy machine.
BACK_S_MAX = 90.0  # Loading a model again.
OUTPUT_TOKENS = 80


class Asker:
    """One request in a thread of its own."""

    def __init__(self, server: Server) -> None:
        self.tokens: list[int] = []
        self.result: Result | None = None
        self.error: ClientError | None = None
        self._server = server
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the request neither goes on nor ends"

    def _run(self) -> None:
        try:
            with (
                Client(self._server.endpoint) as client,
                client.generate(
                    [11, 12, 13], max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenise=False
                ) as generation,
            ):
                for token in generation:
                    self.tokens.append(token.id)
                self.result = generation.result
        except ClientError as error:
            self.error = error


@contextmanager
def second_decode_worker(server: Server) -> Generator[None]:
    command = (
        *(sys.executable, "-m", "tidegate", "worker", server.model, "--role", "decode"),
        *("--name", "decode-1", "--endpoint", f"ipc://{server.folder}/workers.sock"),
        *("--dtype", "float32", "--log", str(server.log)),
    )
    with server.output.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        wait_until(lambda: len(server.lines("worker_joined")) == 3, BACK_S_MAX, "it joins not")
        yield
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("smollm2-135m", "--dtype", "float32", *OPTIONS) as running:
        yield running


def pid_of(server: Server, worker: str) -> int:
    """Of the newest process under this name."""
    started = [line for line in server.lines("process_started") if line["process"] == worker]
    return int(started[-1]["pid"])


def wait_until_back(server: Server, join_count: int) -> None:
    """Wait until workers have joined so many times in all, and a token can flow."""

    def is_back() -> bool:
        joined = len(server.lines("worker_joined"))
        return joined == join_count and server.health()["status"] == "ready"

    wait_until(is_back, BACK_S_MAX, "the worker does not come back")
    server.wait_until_all_pages_are_free()


def test_a_request_whose_decode_worker_hangs_goes_on_elsewhere(server: Server) -> None:
    alone = Asker(server)
    alone.join(60)
    assert len(alone.tokens) == OUTPUT_TOKENS
    with second_decode_worker(server):
        asker = Asker(server)
        wait_until(lambda: len(asker.tokens) > 3, 30, "no tokens")
        (started,) = server.lines("decode_started")[1:]
        os.kill(pid_of(server, started["worker"]), signal.SIGSTOP)
        stopped = time.monotonic()
        asker.join(60)
        assert asker.error is None and asker.tokens == alone.tokens
        took_s = time.monotonic() - stopped
        assert took_s > STALL_S - MARGIN_S
        (suspect,) = server.lines("worker_suspect")
        assert suspect["worker"] == started["worker"]
        if started["worker"] == "decode-1":
            # Nobody but us has started it, so it is only closed.
            wait_until(lambda: bool(server.lines("process_to_kill")), 30, "it is not fenced")
            os.kill(pid_of(server, "decode-1"), signal.SIGCONT)
        else:
            wait_until_back(server, 4)
            assert len(server.lines("process_restarted")) == 1


@pytest.mark.parametrize(
    "worker", ["prefill-0", pytest.param("decode-0", marks=pytest.mark.slow)]
)
def test_a_request_ends_in_time_when_the_only_worker_hangs_and_the_next_one_works(
    server: Server, worker: str
) -> None:
    fence_count = len(server.lines("process_to_kill"))
    restarts = len(server.lines("process_restarted"))
    joins = len(server.lines("worker_joined"))
    if worker == "prefill-0":
        os.kill(pid_of(server, worker), signal.SIGSTOP)
        begin = time.monotonic()
        asker = Asker(server)
    else:
        asker = Asker(server)
        wait_until(lambda: len(asker.tokens) > 3, 30, "no tokens")
        os.kill(pid_of(server, worker), signal.SIGSTOP)
        begin = time.monotonic()
    asker.join(STALL_S + FENCE_S + MARGIN_S)
    assert time.monotonic() - begin > STALL_S - MARGIN_S
    assert asker.error is not None and f"worker {worker} gave no answer" in str(asker.error)
    wait_until_back(server, joins + 1)
    assert len(server.lines("process_restarted")) == restarts + 1
    assert len(server.lines("process_to_kill")) == fence_count + 1
    again = Asker(server)
    again.join(60)
    assert again.error is None and len(again.tokens) == OUTPUT_TOKENS


@pytest.mark.slow
def test_a_pause_below_the_limit_does_no_harm(server: Server) -> None:
    suspects = len(server.lines("worker_suspect"))
    asker = Asker(server)
    wait_until(lambda: len(asker.tokens) > 3, 30, "no tokens")
    os.kill(pid_of(server, "decode-0"), signal.SIGSTOP)
    time.sleep(STALL_S / 4)
    os.kill(pid_of(server, "decode-0"), signal.SIGCONT)
    asker.join(60)
    assert asker.error is None and len(asker.tokens) == OUTPUT_TOKENS
    assert len(server.lines("worker_suspect")) == suspects
