"""What tests of hung workers share: a request in a thread, more workers, and who runs what."""

import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from end_to_end.serving import Server, wait_until
from tidegate import Client
from tidegate.clients.library import ClientError, Result

STALL_S = 4.0
FENCE_S = 1.0
OPTIONS = ("--stall-timeout", str(STALL_S), "--fence-timeout", str(FENCE_S))
MARGIN_S = 3.0  # On a busy machine.
BACK_S_MAX = 90.0  # Loading a model again.
OUTPUT_TOKENS = 80
SHORT_PROMPT = (11, 12, 13)


class Asker:
    """One request in a thread of its own."""

    def __init__(
        self,
        server: Server,
        prompt: Sequence[int] = SHORT_PROMPT,
        output_tokens: int = OUTPUT_TOKENS,
    ) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.result: Result | None = None
        self.error: ClientError | None = None
        self._server = server
        self._prompt = prompt
        self._output_tokens = output_tokens
        self._is_enough = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the request neither goes on nor ends"

    def leave(self) -> None:
        """Cancel the request, at its next token."""
        self._is_enough = True
        self.join(30)

    def _run(self) -> None:
        try:
            with (
                Client(self._server.endpoint) as client,
                client.generate(
                    self._prompt,
                    max_tokens=self._output_tokens,
                    ignore_eos=True,
                    detokenise=False,
                ) as generation,
            ):
                for token in generation:
                    self.tokens.append(token.id)
                    self.times.append(time.monotonic())
                    if self._is_enough:
                        return
                self.result = generation.result
        except ClientError as error:
            self.error = error


@contextmanager
def another_worker(
    server: Server, role: str, name: str
) -> Generator["subprocess.Popen[bytes]"]:
    """A worker that nobody starts again. It has joined when this is entered."""
    command = (
        *(sys.executable, "-m", "tidegate", "worker", server.model, "--role", role),
        *("--name", name, "--endpoint", f"ipc://{server.folder}/workers.sock"),
        *("--dtype", "float32", "--log", str(server.log)),
    )
    joined = len(server.lines("worker_joined"))
    with server.output.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        wait_until(
            lambda: len(server.lines("worker_joined")) > joined, BACK_S_MAX, "it joins not"
        )
        yield process
    finally:
        process.terminate()
        process.wait(10)


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


def next_line(server: Server, event: str, count: int, seconds: float = 30.0) -> dict[str, Any]:
    """The first line of this event after `count` others, once it is there."""
    wait_until(lambda: len(server.lines(event)) > count, seconds, f"no {event}")
    return server.lines(event)[count]
