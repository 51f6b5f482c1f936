"""Cached prompts on real servers: the same tokens as without a cache, for every kind of hit.

Tenants never share pages. So a prompt of a tenant that has sent nothing before runs cold, on
the same server.
"""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
import trio

from end_to_end.serving import Server, serve
from tidegate import AsyncClient

PAGE = 16  # The default of `serve`, and so the unit of a hit.
WINDOW = 512  # Gemma's.
TOKENS = 4  # Sampled after each prompt.
strangers = (f"stranger-{number}" for number in itertools.count())


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 40_000) for _ in range(count)]


class Asker:
    """Asks one server, and compares with a run that finds nothing cached."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(self, prompt: Sequence[int], tenant: str) -> tuple[tuple[int, ...], int]:
        """The tokens of the answer, and how many of the prompt were cached."""
        result = await self._client.complete(
            list(prompt), max_tokens=TOKENS, ignore_eos=True, detokenise=False, tenant=tenant
        )
        assert result.usage.prompt_tokens == len(prompt)
        return result.token_ids, result.usage.cached_tokens

    async def check(self, prompt: Sequence[int], tenant: str, alike: int) -> tuple[int, ...]:
        """Ask as a tenant of whose prompts one begins with the first `alike` tokens."""
        found, cached = await self.ask(prompt, tenant)
        cold, nothing = await self.ask(prompt, next(strangers))
        assert nothing == 0
        assert found == cold
        assert cached == min(alike, len(prompt) - 1) // PAGE * PAGE
        return found


GEMMA = ("gemma3-270m", "--window-pool-tokens", "8192")
SERVERS = [
    pytest.param(GEMMA, id="gemma-pd"),
    pytest.param(
        (*GEMMA, "--swa-only-transfer", "false"), id="whole-windows", marks=pytest.mark.slow
    ),
    pytest.param((*GEMMA, "--role-both"), id="gemma-both", marks=pytest.mark.slow),
    pytest.param(("smollm2-135m",), id="smollm2-pd", marks=pytest.mark.slow),
]
# Around pages, and around where the window of a later token begins.
FEW = (PAGE + 1, WINDOW - 1, WINDOW, WINDOW + PAGE)
MANY = tuple(
    max(0, edge + step)
    for edge in (1, PAGE, 2 * PAGE, WINDOW - PAGE, WINDOW, WINDOW + PAGE, WINDOW + 2 * PAGE)
    for step in (-1, 0, 1)
)


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    options = ("--dtype", "float32", "--poison-freed-pages", "--full-pool-tokens", "8192")
    with serve(*request.param, *options) as running:
        yield running
        running.wait_until_all_pages_are_free()
        assert not running.lines("row_fault")
        assert not running.lines("internal_error")


@pytest.mark.parametrize(
    "edges",
    [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)],
)
async def test_hits_that_end_around_pages_and_the_window_give_the_tokens_of_a_cold_run(
    server: Server, edges: tuple[int, ...]
) -> None:
    long = tokens(WINDOW + 3 * PAGE, seed=1)
    tenant = f"a{len(edges)}"
    async with AsyncClient(server.endpoint) as client:
        asker = Asker(client)
        await asker.ask([*long, 5, 6], tenant)
        for alike in edges:
            prompt = [*long[:alike], *tokens(3, seed=100 + alike)]
            await asker.check(prompt, tenant, alike)


async def test_a_prompt_that_is_cached_whole_is_answered_as_the_first_time(
    server: Server,
) -> None:
    async with AsyncClient(server.endpoint) as client:
        asker = Asker(client)
        for count in (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 4 * PAGE):
            prompt = tokens(count, seed=count)
            first, cached = await asker.ask(prompt, "b")
            assert cached == 0
            again, cached = await asker.ask(prompt, "b")
            assert again == first
            assert cached == (count - 1) // PAGE * PAGE


async def test_every_turn_of_a_conversation_finds_the_one_before(server: Server) -> None:
    async with AsyncClient(server.endpoint) as client:
        asker = Asker(client)
        prompt, alike = tokens(90, seed=2), 0
        for turn in range(3):
            answer = await asker.check(prompt, "c", alike)
            alike = len(prompt) - 1  # The unit that ends with a prompt is not kept.
            prompt = [*prompt, *answer, *tokens(20 + 7 * turn, seed=200 + turn)]


async def test_prompts_that_part_before_the_window_are_answered_as_cold_runs_are(
    server: Server,
) -> None:
    async with AsyncClient(server.endpoint) as client:
        asker = Asker(client)
        for seed, order in ((3, (1, 2)), (4, (2, 1))):
            long = tokens(WINDOW + 40, seed)
            hits: list[int] = []
            for tail in order:
                prompt = [*long, *tokens(40, seed=300 + tail)]
                found, cached = await asker.ask(prompt, "d")
                cold, _ = await asker.ask(prompt, next(strangers))
                assert found == cold
                hits.append(cached)
            assert hits[0] == 0 < hits[1] <= len(long)


async def test_a_prompt_asked_many_times_at_once_has_one_answer(server: Server) -> None:
    prompt = tokens(100, seed=5)
    async with AsyncClient(server.endpoint) as client:
        asker = Asker(client)
        found = [await asker.ask(prompt, "e") for _ in range(2)]

        async def ask(tenant: str) -> None:
            found.append(await asker.ask(prompt, tenant))

        for tenant in ("e", next(strangers)):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(ask, tenant)
        assert len({answer for answer, _ in found}) == 1
        assert [cached for _, cached in found[1:10]] == [96] * 9
