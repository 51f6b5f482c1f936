"""SIGSTOP in each phase of a request. It ends with the right tokens, or in time with an error;
who runs on a healthy worker notices nothing, and in the end each page is free.

Freed pages are poisoned, so that whoever reads or writes pages of others is found out.
"""

import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise

import pytest

from end_to_end.hanging import (
    BACK_S_MAX,
    FENCE_S,
    MARGIN_S,
    OPTIONS,
    STALL_S,
    Asker,
    another_worker,
    next_line,
    pid_of,
    wait_until_back,
)
from end_to_end.serving import Server, serve, wait_until

pytestmark = pytest.mark.slow

LONG_PROMPT = tuple(17 + 31 * index % 40_000 for index in range(1_500))
OUTPUT_TOKENS = 20
BYSTANDER_PROMPT = (21, 22, 23, 24)
BYSTANDER_TOKENS = 2_000  # It is cancelled before.
ENDS_S_MAX = 90.0
EARLIER = "--early-handoff"
LATER = "--no-early-handoff"


@pytest.fixture(params=[EARLIER, LATER])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    options = ("--dtype", "float32", "--no-prefix-cache", "--poison-freed-pages", *OPTIONS)
    # A launch takes less than a second then, and not as long as the limit.
    chunks = ("--chunk-tokens", "256")
    with serve("smollm2-135m", *options, *chunks, request.param) as running:
        yield running


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, ...], list[int]]:
    return {}


@pytest.fixture
def expected(
    server: Server, found: dict[tuple[int, ...], list[int]]
) -> dict[tuple[int, ...], list[int]]:
    """Tokens of both prompts on workers that have nothing else to do: of the first server."""
    for prompt, count in ((LONG_PROMPT, OUTPUT_TOKENS), (BYSTANDER_PROMPT, 400)):
        if prompt not in found:
            asker = Asker(server, prompt, count)
            asker.join(ENDS_S_MAX)
            found[prompt] = asker.tokens
    return found


class Incident:
    """Which lines the log had before, and when the worker was stopped."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.counts = {
            event: len(server.lines(event))
            for event in (
                *("chunk_done", "handoff_started", "decode_started", "worker_suspect"),
                *("process_to_kill", "process_restarted", "worker_joined", "row_fault"),
            )
        }
        self.stopped_at = 0.0

    def next(self, event: str) -> dict[str, object]:
        return next_line(self.server, event, self.counts[event])

    def stop(self, worker: str) -> None:
        os.kill(pid_of(self.server, worker), signal.SIGSTOP)
        self.stopped_at = time.time()

    def check_times(self, worker: str, work_since: float = 0.0, suspect_count: int = 1) -> None:
        """The worker was suspect and fenced within the stated times, and is back.

        They begin when it had work to do and did not do it. Without work, it is fenced at the
        same time and was not suspect.
        """
        since = max(self.stopped_at, work_since)
        killed = self.next("process_to_kill")
        assert killed["worker"] == worker
        assert seconds_of(killed) - self.stopped_at > STALL_S
        assert seconds_of(killed) - since < STALL_S + FENCE_S + MARGIN_S
        suspects = self.server.lines("worker_suspect")[self.counts["worker_suspect"] :]
        assert [line["worker"] for line in suspects] == [worker] * suspect_count
        for line in suspects:
            assert STALL_S - MARGIN_S < seconds_of(line) - since < STALL_S + MARGIN_S
        wait_until_back(self.server, self.counts["worker_joined"] + 1)
        assert len(self.server.lines("process_restarted")) > self.counts["process_restarted"]
        assert len(self.server.lines("row_fault")) == self.counts["row_fault"]


def seconds_of(line: dict[str, object]) -> float:
    return datetime.fromisoformat(str(line["time"])).timestamp()


def owes_nothing(server: Server, worker: str) -> bool:
    pools = [pool for pool in server.health()["pools"] if pool["worker"] == worker]
    return bool(pools) and all(pool["free_count"] == pool["page_count"] for pool in pools)


@contextmanager
def bystander(
    server: Server, expected: dict[tuple[int, ...], list[int]], worker: str
) -> Generator[None]:
    """A request that decodes on this worker all the time, and notices nothing."""
    before = len(server.lines("decode_started"))
    asker = Asker(server, BYSTANDER_PROMPT, BYSTANDER_TOKENS)
    line = next_line(server, "decode_started", before)
    assert line["worker"] == worker, "the test needs it elsewhere"
    wait_until(lambda: len(asker.tokens) > 3, 30, "no tokens")
    yield
    asker.leave()
    tokens = expected[BYSTANDER_PROMPT]
    count = min(len(asker.tokens), len(tokens))
    assert asker.error is None and count > 20
    assert asker.tokens[:count] == tokens[:count]
    assert max(b - a for a, b in pairwise(asker.times)) < STALL_S


def test_while_its_prompt_runs(
    server: Server, expected: dict[tuple[int, ...], list[int]]
) -> None:
    with another_worker(server, "prefill", "prefill-1"):
        with bystander(server, expected, "decode-0"):
            incident = Incident(server)
            asker = Asker(server, LONG_PROMPT, OUTPUT_TOKENS)
            assert incident.next("chunk_done")["worker"] == "prefill-0"
            incident.stop("prefill-0")
            asker.join(ENDS_S_MAX)
            assert asker.error is None and asker.tokens == expected[LONG_PROMPT]
        incident.check_times("prefill-0")


def test_its_target_while_it_is_handed_over(
    server: Server, expected: dict[tuple[int, ...], list[int]]
) -> None:
    with another_worker(server, "decode", "decode-1"):
        # The bystander takes the one, so the other is where the request goes.
        aside = Asker(server, BYSTANDER_PROMPT, BYSTANDER_TOKENS)
        wait_until(lambda: len(aside.tokens) > 3, 30, "no tokens")
        with bystander(server, expected, "decode-1"):
            aside.leave()
            wait_until(lambda: owes_nothing(server, "decode-0"), 30, "its pages are held")
            incident = Incident(server)
            incident.stop("decode-0")
            asker = Asker(server, LONG_PROMPT, OUTPUT_TOKENS)
            asker.join(ENDS_S_MAX)
            assert asker.error is None and asker.tokens == expected[LONG_PROMPT]
            assert incident.next("decode_started")["worker"] == "decode-1"
        if EARLIER in server.options:
            # It is to copy pages when the first chunk is over.
            incident.check_times("decode-0", seconds_of(incident.next("chunk_done")))
        else:
            # It has been silent for too long already when it would be suspect.
            assert incident.next("handoff_started")["target"] == "decode-0"
            incident.check_times("decode-0", suspect_count=0)


def test_its_source_while_it_is_handed_over(
    server: Server, expected: dict[tuple[int, ...], list[int]]
) -> None:
    with another_worker(server, "prefill", "prefill-1"):
        incident = Incident(server)
        target = pid_of(server, "decode-0")
        asker = Asker(server, LONG_PROMPT, OUTPUT_TOKENS)
        wait_until(
            lambda: len(server.lines("chunk_done")) == incident.counts["chunk_done"] + 3,
            30,
            "no chunks",
        )
        os.kill(target, signal.SIGSTOP)
        started = incident.next("handoff_started")
        assert started["source"] == "prefill-0"
        incident.stop("prefill-0")
        os.kill(target, signal.SIGCONT)
        # Its pages can be read all the same.
        asker.join(ENDS_S_MAX)
        assert asker.error is None and asker.tokens == expected[LONG_PROMPT]
        done = next_line(server, "handoff_done", len(server.lines("handoff_done")) - 1)
        incident.check_times("prefill-0", seconds_of(done))


def test_while_it_decodes(server: Server, expected: dict[tuple[int, ...], list[int]]) -> None:
    with another_worker(server, "decode", "decode-1"):
        aside = Asker(server, BYSTANDER_PROMPT, BYSTANDER_TOKENS)
        wait_until(lambda: len(aside.tokens) > 3, 30, "no tokens")
        with bystander(server, expected, "decode-1"):
            aside.leave()
            incident = Incident(server)
            asker = Asker(server, LONG_PROMPT, OUTPUT_TOKENS)
            wait_until(lambda: len(asker.tokens) > 3, ENDS_S_MAX, "no tokens")
            assert incident.next("decode_started")["worker"] == "decode-0"
            incident.stop("decode-0")
            asker.join(ENDS_S_MAX)
            assert asker.error is None and asker.tokens == expected[LONG_PROMPT]
        incident.check_times("decode-0")


def test_while_it_waits_for_the_only_worker_that_could_run_it(
    server: Server, expected: dict[tuple[int, ...], list[int]]
) -> None:
    with bystander(server, expected, "decode-0"):
        incident = Incident(server)
        first = Asker(server, LONG_PROMPT, OUTPUT_TOKENS)
        incident.next("chunk_done")
        incident.stop("prefill-0")
        second = Asker(server, LONG_PROMPT, OUTPUT_TOKENS)
        for asker in (first, second):
            asker.join(STALL_S + FENCE_S + MARGIN_S + BACK_S_MAX)
            assert asker.error is not None
            assert "worker prefill-0 gave no answer" in str(asker.error)
        assert time.time() - incident.stopped_at < STALL_S + FENCE_S + MARGIN_S
    incident.check_times("prefill-0")
    again = Asker(server, LONG_PROMPT, OUTPUT_TOKENS)
    again.join(ENDS_S_MAX)
    assert again.tokens == expected[LONG_PROMPT]
