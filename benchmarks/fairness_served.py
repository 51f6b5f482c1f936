"""Tenants with backlogs on a real server, as its clients see them."""

import time
from collections.abc import Sequence
from random import Random

import trio

from end_to_end.serving import serve
from fairness_runs import Fairness, difference_of, share_of
from tidegate import AsyncClient
from tidegate.clients.generation import Generation

ROWS = 4
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 8
TOKEN_COST = 4  # Of a sampled token; a computed position of a prompt is 1.
COST = PROMPT_TOKENS + TOKEN_COST * OUTPUT_TOKENS  # What a request is charged.
BOUND = 2 * ROWS * COST  # What has begun and not ended is of ROWS requests at most.
LATE_COUNT = 5
TIMES_AS_MANY = 10
TENANTS = ("busy", "calm", "late")


class Watch:
    """What each tenant's clients have had. Names are who sends, not whom the scheduler is told
    of."""

    def __init__(self) -> None:
        self.served: dict[str, int] = dict.fromkeys(TENANTS, 0)
        self.services: list[dict[str, int]] = []  # As it was after each answer.
        self.begun: list[str] = []  # By their first token.
        self._moved = trio.Event()

    async def read(self, generation: Generation, tenant: str) -> None:
        """To its end. The prompt counts with the first token."""
        is_first = True
        while tokens := await generation.read():
            self.served[tenant] += TOKEN_COST * len(tokens)
            if is_first:
                self.served[tenant] += PROMPT_TOKENS
                self.begun.append(tenant)
                is_first = False
            self.services.append(dict(self.served))
            self._moved.set()
            self._moved = trio.Event()

    async def until_begun(self, count: int, tenants: Sequence[str] = TENANTS) -> None:
        while sum(tenant in tenants for tenant in self.begun) < count:
            await self._moved.wait()


def served(model: str, threads: int, calm_count: int) -> tuple[Fairness, Fairness]:
    """By fair shares, and as if all were one tenant's: by one server, one after the other."""
    options = ["--threads", str(threads), "--max-running", str(ROWS), "--bypass-requests", "0"]
    options += ["--role-both", "--full-pool-tokens", "4096", "--no-prefix-cache"]
    with serve(model, *options) as server:
        fair = trio.run(_run, server.endpoint, calm_count, True)
        return fair, trio.run(_run, server.endpoint, calm_count, False)


async def _run(endpoint: str, calm_count: int, are_apart: bool) -> Fairness:
    watch = Watch()
    random = Random(0)

    async def send(tenant: str) -> None:
        generation = client.generate(
            [random.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)],
            tenant=tenant if are_apart else "",
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            detokenise=False,
        )
        await generation.start()
        nursery.start_soon(watch.read, generation, tenant)

    async with AsyncClient(endpoint) as client, trio.open_nursery() as nursery:
        for _ in range(calm_count):
            for _ in range(TIMES_AS_MANY):
                await send("busy")
            await send("calm")
        start = len(watch.services)  # From here on both have sent all.
        await watch.until_begun(len(watch.begun) + calm_count // 2)
        arrived, begun_before, came = len(watch.services), len(watch.begun), time.monotonic()
        for _ in range(LATE_COUNT):
            await send("late")
        await watch.until_begun(1, ("late",))
        wait_s = time.monotonic() - came
        await watch.until_begun(LATE_COUNT, ("late",))
        late_has_all = len(watch.services)
        await watch.until_begun(calm_count, ("calm",))
        nursery.cancel_scope.cancel()
    services = watch.services
    return Fairness(
        {name: count - services[start][name] for name, count in services[-1].items()},
        difference_of(services[start:]),
        BOUND,
        watch.begun.index("late") - begun_before,
        wait_s,
        share_of("late", services[arrived], services[late_has_all - 1]),
    )
