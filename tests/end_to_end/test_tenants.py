"""Tenants on a whole server: each gets its share, and a full queue answers at once."""

import statistics
import time
from collections import Counter
from random import Random
from typing import Any

import httpx
import pytest
import trio

from end_to_end.serving import Server, serve
from tidegate import AsyncClient
from tidegate.clients.generation import Generation
from tidegate.clients.library import RequestFailed, RequestRefused

MODEL = "smollm2-135m"
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 8
COST = PROMPT_TOKENS + 4 * OUTPUT_TOKENS  # What a request is charged.
ROWS = 4
CALM_COUNT = 10  # Requests of the tenant that sends a tenth of the other's.


def prompt(seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]


async def read_all(generation: Generation) -> None:
    while await generation.read():
        pass


def ask(client: AsyncClient, seed: int, tenant: str, **options: Any) -> Generation:
    options = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "detokenise": False} | options
    return client.generate(prompt(seed), tenant=tenant, **options)


def order_of(server: Server) -> tuple[list[str], int]:
    """The tenants of the requests in the order in which these began, and how many had begun
    when the late one came."""
    tenants: dict[str, str] = {}
    order: list[str] = []
    before_late = 0
    for line in server.lines():
        if line["event"] == "request_received":
            tenants[line["request_id"]] = line["tenant"]
            if line["tenant"] == "late":
                before_late = len(order)
        elif line["event"] == "request_admitted":
            order.append(tenants[line["request_id"]])
    return order, before_late


async def test_two_tenants_share_the_server_and_a_third_is_served_at_once() -> None:
    """The first sends ten times as much as the second. What each was given, while both had
    requests waiting, differs by less than the bound; a third that comes late goes next."""
    options = ("--threads", "1", "--max-running", str(ROWS), "--bypass-requests", "0")
    with serve(MODEL, *options, "--role-both", "--full-pool-tokens", "4096") as server:
        async with AsyncClient(server.endpoint) as client:
            busy = [ask(client, number, "busy") for number in range(10 * CALM_COUNT)]
            calm = [ask(client, 1000 + number, "calm") for number in range(CALM_COUNT)]
            for number, generation in enumerate(busy):
                await generation.start()
                if number % 10 == 9:
                    await calm[number // 10].start()
            await read_all(calm[CALM_COUNT // 2])
            await read_all(ask(client, 2000, "late"))
            for generation in calm:
                await read_all(generation)
            for generation in busy:
                generation.close()
        server.wait_until_all_pages_are_free()
        order, before_late = order_of(server)
    # From the first one's beginning to the last one's, which waited as long as the others.
    calms = [index for index, tenant in enumerate(order) if tenant == "calm"]
    while_both = Counter(order[calms[0] : calms[-1]])
    bound = 2 * ROWS * COST  # What has begun and not ended is of ROWS requests at most.
    difference = abs(while_both["busy"] - while_both["calm"]) * COST
    print(f"{while_both} of {COST} tokens each; {difference} of {bound}")
    assert len(calms) == CALM_COUNT and difference <= bound
    # Those that are before it in the order may have one more each.
    assert order.index("late") - before_late <= 2


async def test_a_full_queue_answers_at_once_while_streams_go_on() -> None:
    options = ("--threads", "1", "--max-running", "2", "--queue-requests", "6")
    with serve(MODEL, *options, "--role-both", "--full-pool-tokens", "4096") as server:
        async with (
            AsyncClient(server.endpoint) as client,
            httpx.AsyncClient(base_url=server.url, timeout=30) as http,
            trio.open_nursery() as nursery,
        ):
            streams = [ask(client, number, "a", max_tokens=1500) for number in range(2)]
            for stream in streams:
                await stream.read()
            # Half of the queue, which is all that a tenant may have.
            queued = [ask(client, 10 + number, "a") for number in range(3)]
            for generation in queued:
                await generation.start()
            gaps: list[float] = []

            async def watch(stream: Generation) -> None:
                before = time.monotonic()
                while await stream.read():
                    gaps.append(time.monotonic() - before)
                    before = time.monotonic()

            for stream in streams:
                nursery.start_soon(watch, stream)
            waits: list[float] = []
            for _ in range(20):
                begin = time.monotonic()
                with pytest.raises(RequestRefused) as caught:
                    await ask(client, 99, "a").start()
                waits.append(time.monotonic() - begin)
                assert (caught.value.status, caught.value.code) == (429, "tenant_queue_full")
                assert 1000 <= caught.value.retry_after_ms <= 60_000
                await trio.sleep(0.01)
            others = [ask(client, 20 + number, "b") for number in range(3)]
            for generation in others:
                await generation.start()
            body = {"prompt": prompt(5), "max_tokens": 4}
            headers = {"X-Tidegate-Tenant": "c"}
            begin = time.monotonic()
            response = await http.post("/v1/completions", json=body, headers=headers)
            http_s = time.monotonic() - begin
            assert response.status_code == 503, response.text
            assert response.json()["error"]["code"] == "queue_full"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            headers = {"X-Tidegate-Tenant": "a"}
            response = await http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 429
            assert response.json()["error"]["type"] == "rate_limit_error"
            nursery.cancel_scope.cancel()
        refused = server.lines("request_refused")
        assert {line["tenant"] for line in refused} == {"a", "c"}
        print(f"refused in {statistics.median(waits)} s, over HTTP in {http_s} s")
        assert gaps
        assert statistics.median(waits) < 0.1 and http_s < 1.0
        server.wait_until_all_pages_are_free()


async def test_deadlines_end_requests_and_what_came_before_is_kept() -> None:
    with serve(MODEL, "--role-both", "--threads", "1", "--max-running", "1") as server:
        async with AsyncClient(server.endpoint) as client:
            with pytest.raises(RequestFailed) as caught:
                await client.complete(
                    prompt(1), max_tokens=4000, ignore_eos=True, total_timeout_ms=1500
                )
            failure = caught.value
            assert (failure.status, failure.code) == (503, "timeout")
            assert "its own timeout of 1.5 s in all passed after" in failure.text
            assert failure.partial is not None
            count = failure.partial.usage.output_tokens
            assert count == len(failure.partial.token_ids) > 5 and failure.partial.text
            stream = ask(client, 2, "", max_tokens=4000)
            await stream.read()
            with pytest.raises(RequestFailed, match="before its first token"):
                await read_all(ask(client, 3, "", timeout_ms=200))
            stream.close()
        body = {"prompt": "One, two,", "max_tokens": 4000, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            response = await http.post("/v1/completions", json=body | {"total_timeout_ms": 900})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "timeout")
        assert error["usage"]["completion_tokens"] > 0 and error["partial_text"]
        finished = server.lines("request_finished")
        assert [line["reason"] for line in finished].count("timeout") == 3
        server.wait_until_all_pages_are_free()
