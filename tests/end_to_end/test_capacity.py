"""What the pools hold is accepted and runs to its end; what they do not is refused at once."""

from collections.abc import Iterator
from datetime import datetime

import msgspec
import pytest
import trio

from end_to_end.serving import Server, serve
from tidegate import AsyncClient
from tidegate.cli.main import build_parser
from tidegate.cli.planning import Plan
from tidegate.clients.library import EndReason, RequestRefused

WINDOW = 512
PAGE_TOKENS = 16
FULL_TOKENS = 4096
WINDOW_TOKENS = 1600  # Less than half of the longest prompt.
REFUSE_MS_MAX = 10.0


def prompt(length: int) -> list[int]:
    return [2] + [1000 + 7 * index % 5000 for index in range(length - 1)]


async def complete(client: AsyncClient, length: int, max_tokens: int) -> EndReason:
    result = await client.complete(
        prompt(length), max_tokens=max_tokens, ignore_eos=True, detokenise=False
    )
    assert len(result.token_ids) == max_tokens
    return result.reason


async def refusal(client: AsyncClient, length: int, max_tokens: int) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        await complete(client, length, max_tokens)
    return caught.value


def refusal_ms(server: Server) -> float:
    """From the last refused request's arrival at the scheduler to its refusal, by the log."""
    last = server.lines("request_refused")[-1]
    received = [
        line
        for line in server.lines("request_received")
        if line["request_id"] == last["request_id"]
    ]
    times = [datetime.fromisoformat(line["time"]) for line in (received[0], last)]
    return (times[1] - times[0]).total_seconds() * 1000


OPTIONS = (
    "gemma3-270m",
    *("--full-pool-tokens", str(FULL_TOKENS)),
    *("--window-pool-tokens", str(WINDOW_TOKENS)),
    *("--max-running", "8"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(*OPTIONS, "--poison-freed-pages") as server:
        yield server


async def test_the_server_is_what_the_plan_said(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = build_parser().parse_args(["plan", *OPTIONS, "--json"])
    assert arguments.run(arguments) == 0
    plan = msgspec.json.decode(capsys.readouterr().out, type=Plan)
    async with AsyncClient(server.endpoint) as client:
        status = await client.status()
    assert status.longest_prompt == plan.servers[0].longest_prompts[0].tokens
    assert sorted(
        (pool.role.value, pool.pool, pool.page_count, pool.page_tokens) for pool in status.pools
    ) == sorted(
        (worker.role, pool.name, pool.page_count, pool.page_tokens)
        for worker in plan.workers
        for pool in worker.pools
    )


async def test_the_longest_prompt_fills_the_full_pool_and_one_token_more_is_refused(
    server: Server,
) -> None:
    async with AsyncClient(server.endpoint) as client:
        status = await client.status()
        assert status.longest_prompt == FULL_TOKENS
        async with client.generate(
            prompt(40), max_tokens=200, ignore_eos=True, detokenise=False
        ) as other:
            await other.read()
            refused = await refusal(client, FULL_TOKENS + 1, 1)
            assert refused.status == 400
            assert refused.pool == "full"
            assert refused.needed == FULL_TOKENS // PAGE_TOKENS + 1
            assert refused.limit == FULL_TOKENS // PAGE_TOKENS
            assert refusal_ms(server) < REFUSE_MS_MAX
            assert await complete(client, FULL_TOKENS, 1) is EndReason.LENGTH
            while await other.read():
                pass
            assert other.result is not None
            assert len(other.result.token_ids) == 200
    server.wait_until_all_pages_are_free()


async def test_the_keys_and_values_of_prompt_and_output_fill_the_pool_to_the_last_page(
    server: Server,
) -> None:
    async with AsyncClient(server.endpoint) as client:
        assert await complete(client, FULL_TOKENS - 4, 5) is EndReason.LENGTH
        refused = await refusal(client, FULL_TOKENS - 4, 6)
        assert refused.pool == "full"
    server.wait_until_all_pages_are_free()


async def test_a_long_prompt_hands_over_only_the_last_window(server: Server) -> None:
    length = 3000
    async with AsyncClient(server.endpoint) as client:
        await complete(client, length, 4)
    handoff = server.lines("handoff_done")[-1]
    pools = {pool["pool"]: pool for pool in server.health()["pools"]}
    full_pages = -(-length // PAGE_TOKENS)
    window_pages = (length - 1) // PAGE_TOKENS - (length - WINDOW + 1) // PAGE_TOKENS + 1
    moved = full_pages * pools["full"]["page_bytes"]
    moved += window_pages * pools["window"]["page_bytes"]
    assert handoff["bytes_moved"] == moved
    saved = (full_pages - window_pages) * pools["window"]["page_bytes"]
    assert handoff["bytes_saved"] == saved


async def test_long_and_short_prompts_share_a_small_window_pool(server: Server) -> None:
    """More requests than the window pool holds at once: all of them end, one after another."""
    async with AsyncClient(server.endpoint) as client, trio.open_nursery() as nursery:
        for index in range(10):
            nursery.start_soon(complete, client, 200 + 150 * index, 8)
    server.wait_until_all_pages_are_free()


def test_with_the_flag_forced_false_the_window_pool_caps_the_prompt() -> None:
    options = (
        "--swa-only-transfer",
        "false",
        "--full-pool-tokens",
        str(FULL_TOKENS),
        "--window-pool-tokens",
        str(WINDOW_TOKENS),
        "--poison-freed-pages",
    )
    with serve("gemma3-270m", *options) as server:

        async def run() -> None:
            async with AsyncClient(server.endpoint) as client:
                refused = await refusal(client, WINDOW_TOKENS + 1, 2)
                assert refused.status == 400
                assert refused.pool == "window"
                assert refused.limit == WINDOW_TOKENS // PAGE_TOKENS
                assert refused.needed == WINDOW_TOKENS // PAGE_TOKENS + 1
                assert await complete(client, WINDOW_TOKENS, 2) is EndReason.LENGTH
                handoff = server.lines("handoff_done")[-1]
                assert handoff["bytes_saved"] == 0
                # One token needs no hand-off, so the flag does not apply.
                assert await complete(client, FULL_TOKENS, 1) is EndReason.LENGTH

        trio.run(run)
        server.wait_until_all_pages_are_free()
