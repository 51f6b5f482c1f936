"""A decode pool for two requests and a half: six run to their end, each as if it were alone."""

import random
from collections.abc import Sequence

import pytest
import trio

from end_to_end.serving import serve
from tidegate import AsyncClient

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 96
STREAM_COUNT = 6
POOL_TOKENS = 288


def prompt(index: int) -> list[int]:
    draw = random.Random(index)
    return [draw.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]


async def complete(client: AsyncClient, index: int, found: dict[int, Sequence[int]]) -> None:
    result = await client.complete(
        prompt(index), max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenise=False
    )
    assert result.usage.output_tokens == OUTPUT_TOKENS
    assert result.usage.prompt_tokens == PROMPT_TOKENS
    found[index] = result.token_ids


@pytest.mark.parametrize("roles", [(), ("--role-both",)], ids=["pd", "both"])
async def test_preempted_requests_go_on_where_they_were(roles: tuple[str, ...]) -> None:
    options = ("--dtype", "float32", "--full-pool-tokens", str(POOL_TOKENS))
    with serve("smollm2-135m", *options, *roles, "--poison-freed-pages") as server:
        together: dict[int, Sequence[int]] = {}
        alone: dict[int, Sequence[int]] = {}
        async with AsyncClient(server.endpoint) as client:
            async with trio.open_nursery() as nursery:
                for index in range(STREAM_COUNT):
                    nursery.start_soon(complete, client, index, together)
            for index in range(STREAM_COUNT):
                await complete(client, index, alone)
        assert together == alone
        assert server.lines("request_preempted")
        assert not server.lines("row_fault")
        assert not server.lines("internal_error")
        server.wait_until_all_pages_are_free()
