"""Workers that make no progress any more: their requests run elsewhere, or end in time."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from end_to_end.hanging import (
    FENCE_S,
    MARGIN_S,
    OPTIONS,
    OUTPUT_TOKENS,
    STALL_S,
    Asker,
    another_worker,
    pid_of,
    wait_until_back,
)
from end_to_end.serving import Server, serve, wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("smollm2-135m", "--dtype", "float32", *OPTIONS) as running:
        yield running


def test_a_request_whose_decode_worker_hangs_goes_on_elsewhere(server: Server) -> None:
    alone = Asker(server)
    alone.join(60)
    assert len(alone.tokens) == OUTPUT_TOKENS
    with another_worker(server, "decode", "decode-1"):
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
