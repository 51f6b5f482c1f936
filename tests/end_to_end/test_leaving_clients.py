"""Clients that leave at random moments cost nobody else anything, and no page."""

import random
from collections.abc import Iterator

import pytest
import trio

from end_to_end.serving import Server, serve
from tidegate import AsyncClient

STREAM_COUNT = 32
TOKEN_COUNT = 24


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Small pools, so that requests are in every phase at once; float32, so that answers do
    # not depend on who shares the batch.
    with serve(
        "smollm2-135m",
        "--dtype",
        "float32",
        "--full-pool-tokens",
        "3072",
        "--max-running",
        "12",
        "--chunk-tokens",
        "64",
        "--poison-freed-pages",
    ) as server:
        yield server


def prompt(index: int) -> list[int]:
    draw = random.Random(index)
    return [draw.randrange(100, 40_000) for _ in range(draw.randint(5, 120))]


async def complete(client: AsyncClient, index: int) -> tuple[int, ...]:
    result = await client.complete(
        prompt(index), max_tokens=TOKEN_COUNT, ignore_eos=True, detokenise=False
    )
    return result.token_ids


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_rest_finish_right_and_all_pages_come_back(server: Server, seed: int) -> None:
    draw = random.Random(seed)
    leaves_at = {
        index: draw.uniform(0.0, 6.0) for index in draw.sample(range(STREAM_COUNT), 16)
    }
    answers: dict[int, tuple[int, ...]] = {}

    async def run(index: int) -> None:
        # Each has a connection of its own; the leaving ones leave it open or close it.
        with trio.move_on_after(leaves_at.get(index, float("inf"))):
            async with AsyncClient(server.endpoint) as client:
                answers[index] = await complete(client, index)

    async with trio.open_nursery() as nursery:
        for index in range(STREAM_COUNT):
            nursery.start_soon(run, index)
    assert len(answers) >= STREAM_COUNT - len(leaves_at)
    await trio.to_thread.run_sync(server.wait_until_all_pages_are_free)
    async with AsyncClient(server.endpoint) as client:
        for index in sorted(answers)[::5]:
            assert answers[index] == await complete(client, index)
    ended = [line["phase"] for line in server.lines("request_cancelled")]
    assert len(set(ended)) >= 2, ended
    assert not server.lines("row_fault")
    assert not server.lines("internal_error")
