"""The blocking client, used from a thread while the fake scheduler runs in trio."""

import gc
import threading
from collections.abc import Callable

import pytest
import trio

from fakes.behaviours import answer, answer_and_hang, fail, hang
from fakes.fake_scheduler import FakeRequest, FakeScheduler
from fakes.tiny_tokenizers import byte_level
from tidegate import Client
from tidegate.clients.library import (
    ConnectFailed,
    EndReason,
    RequestFailed,
    RequestRefused,
    ServerLost,
)


async def in_thread(call: Callable[[], None]) -> None:
    with trio.fail_after(10):
        await trio.to_thread.run_sync(call, abandon_on_cancel=True)


async def until_cancelled(request: FakeRequest) -> None:
    with trio.fail_after(10):
        await request.cancelled.wait()


async def test_tokens_are_iterated_with_their_text(scheduler: FakeScheduler) -> None:
    ids = byte_level().encode("the cat €").ids
    scheduler.behaviour = answer(*[[token_id] for token_id in ids])

    def use() -> None:
        with Client(scheduler.endpoint) as client:
            generation = client.generate("the dog", max_tokens=len(ids))
            tokens = list(generation)
            assert [token.id for token in tokens] == ids
            assert "".join(token.text for token in tokens) == "the cat €"
            assert generation.result is not None
            assert generation.result.reason is EndReason.LENGTH
            assert client.complete("the dog", max_tokens=len(ids)).text == "the cat €"
            assert client.status().ready
            assert client.card() == scheduler.card

    await in_thread(use)


async def test_leaving_cancels(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = answer_and_hang([1, 2])

    def with_block(client: Client) -> None:
        with client.generate([1], max_tokens=9) as generation:
            assert next(generation).id == 1

    def bare_loop(client: Client) -> None:
        for token in client.generate([1], max_tokens=9):
            assert token.id == 1
            break
        gc.collect()

    def close(client: Client) -> None:
        generation = client.generate([1], max_tokens=9)
        next(generation)
        generation.close()
        with pytest.raises(RequestFailed, match="cancelled"):
            list(generation)

    def closed_client(client: Client) -> None:
        next(client.generate([1], max_tokens=9))

    for way in (with_block, bare_loop, close, closed_client):

        def use(way: Callable[[Client], None] = way) -> None:
            with Client(scheduler.endpoint) as client:
                way(client)

        await in_thread(use)
        await until_cancelled(scheduler.requests[-1])
    assert len(scheduler.requests) == 4


async def test_errors_are_those_of_the_trio_client(scheduler: FakeScheduler) -> None:
    async def refuse(request: FakeRequest) -> None:
        request.refuse(429, "overloaded", "too much")

    def use() -> None:
        with Client(scheduler.endpoint) as client:
            scheduler.behaviour = refuse
            with pytest.raises(RequestRefused, match="too much"), client.generate([1]):
                pass
            scheduler.behaviour = fail(1, text="no more", status=503)
            with pytest.raises(RequestFailed, match="no more"):
                client.complete([1])
            with pytest.raises(ValueError, match="stop"):
                client.complete([1], stop="")

    await in_thread(use)


async def test_a_lost_scheduler_ends_waiting_calls(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = hang
    waiting = threading.Event()

    def use() -> None:
        with Client(scheduler.endpoint) as client, client.generate([1]) as generation:
            waiting.set()
            with pytest.raises(ServerLost):
                next(generation)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, use)
        await trio.to_thread.run_sync(waiting.wait, 5)
        await trio.sleep(0.05)
        scheduler.close()


async def test_a_closed_client_says_so(scheduler: FakeScheduler) -> None:
    def use() -> None:
        with Client(scheduler.endpoint) as client:
            generation = client.generate([1])
        with pytest.raises(ServerLost, match="closed"):
            next(generation)
        with pytest.raises(ServerLost, match="closed"):
            client.status()

    await in_thread(use)


async def test_several_threads_share_a_client(scheduler: FakeScheduler) -> None:
    counts: list[int] = []

    def use() -> None:
        with Client(scheduler.endpoint) as client:

            def ask() -> None:
                counts.append(len(list(client.generate([1], max_tokens=8))))

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    await in_thread(use)
    assert counts == [8] * 8


def test_no_scheduler_is_told_with_the_endpoint(tmp_path: object) -> None:
    endpoint = f"ipc://{tmp_path}/no.sock"
    before = threading.active_count()
    with (
        pytest.raises(ConnectFailed, match=endpoint),
        Client(endpoint, connect_ms_max=50),
    ):
        pass
    assert threading.active_count() <= before + 1


def test_a_client_outside_of_with_says_so() -> None:
    with pytest.raises(RuntimeError, match="inside `with`"):
        Client("ipc:///tmp/none").status()
