"""`why_waiting` of both clients against a scheduler of the real protocol."""

import threading

import msgspec
import pytest
import trio

from fakes.behaviours import answer, hang, ignore
from fakes.fake_scheduler import FakeRequest, FakeScheduler
from fakes.waiting import until
from tidegate.clients.library import (
    AsyncClient,
    Client,
    Generation,
    PageHolder,
    Phase,
    RequestFailed,
    RequestRefused,
    ServerLost,
    Waiting,
    WaitKind,
)
from tidegate.ipc.protocol import Malformed, RequestId, Role, WorkerId

LACK = Waiting(
    RequestId("its own name"),
    Phase.WAITING,
    WaitKind.PAGES,
    "e1-1 waits for 3 more pages of the full pool",
    role=Role.PREFILL,
    worker=WorkerId("p0"),
    pool="full",
    pages_short=3,
    pages_needed=8,
    pages_available=5,
    pages_draining=1,
    pages_cached=2,
    holders=(PageHolder(RequestId("e1-7"), 11), PageHolder(RequestId("e1-3"), 9)),
    holders_left_out=4,
)


async def test_the_answer_has_pool_pages_and_holders_under_the_name_in_logs(
    scheduler: FakeScheduler,
) -> None:
    scheduler.behaviour, scheduler.why = hang, LACK
    async with (
        AsyncClient(scheduler.endpoint) as client,
        client.generate([1], detokenise=False) as generation,
    ):
        found = await generation.why_waiting()
    assert found == msgspec.structs.replace(LACK, request_id="e1-1")


async def test_another_task_asks_while_one_waits_for_tokens(scheduler: FakeScheduler) -> None:
    scheduler.why = LACK
    go_on = trio.Event()
    read: list[int] = []

    async def behave(request: FakeRequest) -> None:
        request.accept()
        await go_on.wait()
        await answer([5, 6])(request)

    scheduler.behaviour = behave
    async with (
        AsyncClient(scheduler.endpoint) as client,
        client.generate([1], max_tokens=2, detokenise=False) as generation,
        trio.open_nursery() as nursery,
    ):

        async def reader() -> None:
            read.extend([token.id async for token in generation])

        nursery.start_soon(reader)
        assert (await generation.why_waiting()).kind is WaitKind.PAGES
        go_on.set()
    assert read == [5, 6]


async def test_each_request_gets_its_own_answer(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = hang
    async with (
        AsyncClient(scheduler.endpoint) as client,
        client.generate([1], detokenise=False) as one,
        client.generate([1], detokenise=False) as other,
        trio.open_nursery() as nursery,
    ):
        names: list[str] = []

        async def ask(generation: Generation) -> None:
            names.append((await generation.why_waiting()).request_id)

        for generation in (other, one, other):
            nursery.start_soon(ask, generation)
    assert sorted(names) == ["e1-1", "e1-2", "e1-2"]
    # Two that ask for the same at the same time share one question.
    assert scheduler.question_count == 2


async def test_a_request_that_is_not_alive_waits_for_nothing(scheduler: FakeScheduler) -> None:
    async with AsyncClient(scheduler.endpoint) as client:
        generation = client.generate([1], max_tokens=2, detokenise=False)
        found = await generation.why_waiting()
        assert (found.kind, found.phase) == (WaitKind.NOTHING, None)
        assert found.text == "the request has not been sent"
        while await generation.read():
            pass
        found = await generation.why_waiting()
        assert (found.request_id, found.kind) == ("e1-1", WaitKind.NOTHING)
        assert found.text == "the request is over"
        assert scheduler.question_count == 0
        scheduler.behaviour = hang
        async with client.generate([1], detokenise=False) as left:
            pass
        assert (await left.why_waiting()).text == "the request is over"


@pytest.mark.parametrize("end", ["refused", "finished", "cancelled"])
async def test_a_question_is_answered_when_its_request_ends(
    scheduler: FakeScheduler, end: str
) -> None:
    scheduler.answers_questions = False
    asked = trio.Event()

    async def behave(request: FakeRequest) -> None:
        if end != "refused":
            request.accept()
        await asked.wait()
        if end == "refused":
            request.refuse(429, "queue_full", "too many")
        elif end == "finished":
            await answer([1])(request)

    scheduler.behaviour = behave
    found: list[Waiting] = []
    async with AsyncClient(scheduler.endpoint) as client, trio.open_nursery() as nursery:
        generation = client.generate([1], detokenise=False)

        async def start() -> None:
            try:
                await generation.start()
            except RequestRefused:
                assert end == "refused"

        async def ask() -> None:
            found.append(await generation.why_waiting())

        nursery.start_soon(start)
        await until(lambda: bool(scheduler.requests))
        nursery.start_soon(ask)
        await until(lambda: bool(scheduler.question_count))
        assert not found
        asked.set()
        if end == "cancelled":
            generation.close()
    assert [one.kind for one in found] == [WaitKind.NOTHING]


async def test_a_lost_scheduler_ends_the_question(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = hang
    scheduler.answers_questions = False
    async with AsyncClient(scheduler.endpoint) as client, trio.open_nursery() as nursery:
        generation = client.generate([1], detokenise=False)
        await generation.start()

        async def ask() -> None:
            with pytest.raises(ServerLost, match="the connection ended"):
                await generation.why_waiting()

        nursery.start_soon(ask)
        await until(lambda: bool(scheduler.question_count))
        scheduler.close()
    with pytest.raises(ServerLost):
        await generation.why_waiting()


async def test_a_scheduler_that_does_not_know_the_question_is_an_error(
    scheduler: FakeScheduler,
) -> None:
    scheduler.behaviour = hang
    scheduler.answers_questions = False
    async with (
        AsyncClient(scheduler.endpoint) as client,
        client.generate([1], detokenise=False) as generation,
    ):

        async def deny() -> None:
            await until(lambda: bool(scheduler.question_count))
            scheduler.requests[0].send(Malformed("unknown tag"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(deny)
            with pytest.raises(RequestFailed, match="unknown tag"):
                await generation.why_waiting()
        assert not scheduler.requests[0].cancels


async def test_a_silent_scheduler_is_no_reason_to_wait_for_ever(
    scheduler: FakeScheduler,
) -> None:
    scheduler.behaviour = ignore
    scheduler.answers_questions = scheduler.pings = False
    async with AsyncClient(scheduler.endpoint, silence_ms_max=200) as client:
        generation = client.generate([1], detokenise=False)
        async with trio.open_nursery() as nursery:

            async def start() -> None:
                with pytest.raises(ServerLost):
                    await generation.start()

            nursery.start_soon(start)
            await until(lambda: bool(scheduler.requests))
            with pytest.raises(ServerLost, match="nothing came"):
                await generation.why_waiting()


async def test_the_blocking_client_asks_as_well_from_any_thread(
    scheduler: FakeScheduler,
) -> None:
    scheduler.why = LACK
    go_on = trio.Event()

    async def behave(request: FakeRequest) -> None:
        request.accept()
        await go_on.wait()
        await answer([5])(request)

    scheduler.behaviour = behave

    def use(token: trio.lowlevel.TrioToken) -> None:
        with (
            Client(scheduler.endpoint) as client,
            client.generate([1], max_tokens=1, detokenise=False) as generation,
        ):
            read: list[int] = []
            reader = threading.Thread(
                target=lambda: read.extend(token.id for token in generation)
            )
            reader.start()
            found = generation.why_waiting()
            assert (found.request_id, found.pool, found.pages_short) == ("e1-1", "full", 3)
            assert found.holders == LACK.holders
            token.run_sync_soon(go_on.set)
            reader.join(5)
            assert read == [5]
            assert generation.why_waiting().kind is WaitKind.NOTHING

    with trio.fail_after(10):
        await trio.to_thread.run_sync(
            use, trio.lowlevel.current_trio_token(), abandon_on_cancel=True
        )
