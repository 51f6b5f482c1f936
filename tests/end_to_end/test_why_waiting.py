"""A pool for one and a half: who waits is told what for, by the scheduler and by the log."""

import random
import subprocess
import sys

import trio

from end_to_end.serving import Server, serve
from tidegate import AsyncClient
from tidegate.clients.library import Phase, WaitKind
from tidegate.clients.logs.why import Step, Stretch, find_why
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Role

PROMPT_TOKENS = 100
OUTPUT_TOKENS = 40
POOL_PAGES = 12
PAGE_TOKENS = 16
WAIT_S_MAX = 10


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]


def logs_why(server: Server, request_id: str) -> str:
    command = [sys.executable, "-m", "tidegate", "logs", "why", request_id, str(server.log)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


async def test_a_request_that_waits_for_pages_is_told_who_holds_them() -> None:
    options = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "detokenise": False}
    pool = ("--full-pool-tokens", str(POOL_PAGES * PAGE_TOKENS))
    with serve("smollm2-135m", *pool, "--log-level", "debug") as server:
        async with AsyncClient(server.endpoint) as client:
            first = client.generate(prompt(1), **options)  # type: ignore[arg-type]
            while not await first.read():
                pass
            second = client.generate(prompt(2), **options)  # type: ignore[arg-type]
            await second.start()
            found = await second.why_waiting()
            with trio.move_on_after(WAIT_S_MAX):
                while (found.kind, found.phase) != (WaitKind.PAGES, Phase.HANDING_OFF):
                    await trio.sleep(0.01)
                    found = await second.why_waiting()
            while await first.read():
                pass
            while await second.read():
                pass
        assert first.result is not None and second.result is not None
        assert second.result.usage.output_tokens == OUTPUT_TOKENS
        holder, waiter = first.result.request_id, second.result.request_id
        assert (found.request_id, found.kind) == (waiter, WaitKind.PAGES)
        assert (found.role, found.worker, found.pool) == (Role.DECODE, "decode-0", "full")
        # Seven pages for 101 positions, and one for the row that may grow.
        assert found.pages_needed == 8
        assert [one.request_id for one in found.holders] == [holder]
        held = found.holders[0].page_count
        assert 7 <= held <= 10
        assert found.pages_short == 8 - (POOL_PAGES - held)

        why = find_why(server.log, waiter)
        waits = [row.wait for row in why.rows if isinstance(row, Stretch)]
        (wait,) = [one for one in waits if (one.phase, one.reason) == ("handing_off", "pages")]
        assert (wait.role, wait.worker, wait.pool) == ("decode", "decode-0", "full")
        assert wait.pages_needed == 8 and list(wait.holders) == [holder]
        (step,) = [
            row
            for row in why.rows
            if isinstance(row, Step) and row.event == LogEvent.HANDOFF_STARTED.value
        ]
        assert step.release is not None
        assert (step.release.request_id, step.release.reason) == (holder, "length")
        assert (why.end_event, why.end_reason) == ("request_finished", "length")
        launches = server.lines("launch")
        fed = sum(line["tokens"] for line in launches)
        assert fed == 2 * (PROMPT_TOKENS + OUTPUT_TOKENS - 1)
        assert all(line["level"] == "debug" and line["busy_us"] > 0 for line in launches)
        text = logs_why(server, waiter)
        assert "more pages of the full pool of decode worker decode-0" in text
        assert f"held by {holder}" in text
        assert not any(isinstance(row, Stretch) for row in find_why(server.log, holder).rows)
