"""Refusals and failures: the right status, OpenAI's shape, and never a silent end."""

import json
from typing import Any

import httpx
import pytest
import trio

from fakes.behaviours import answer, answer_and_hang, fail, hang
from fakes.fake_scheduler import FakeRequest, FakeScheduler
from fakes.running_proxy import RunningProxy
from fakes.waiting import until
from tidegate.ipc.protocol import EndReason

FIELDS = {"prompt": "x", "max_tokens": 9}


Events = list[dict[str, Any]]


async def events_until_end(
    proxy: RunningProxy, fields: dict[str, Any], events: Events | None = None
) -> Events:
    """Events of a stream that may end in any way; `events` fills up while they come."""
    events = [] if events is None else events
    body = {**fields, "stream": True}
    async with proxy.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                events.append(json.loads(line.removeprefix("data: ")))
    return events


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_told_in_full(
    proxy: RunningProxy, scheduler: FakeScheduler, stream: bool
) -> None:
    async def refuse(request: FakeRequest) -> None:
        where = {"pool": "full", "needed": 70, "limit": 64, "role": "decode", "worker": "d1"}
        request.refuse(400, "kv_pool_exceeded", "it does not fit", **where)

    scheduler.behaviour = refuse
    response = await proxy.complete(**FIELDS, stream=stream)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert "retry-after" not in response.headers
    assert response.json()["error"] == {
        "message": "it does not fit",
        "type": "invalid_request_error",
        "param": None,
        "code": "kv_pool_exceeded",
        "pool": "full",
        "needed": 70,
        "limit": 64,
        "role": "decode",
        "worker": "d1",
    }


@pytest.mark.parametrize(
    ("status", "wait_ms", "kind", "retry_after"),
    [(429, 1500, "rate_limit_error", "2"), (503, 0, "server_error", "1")],
)
async def test_who_may_try_again_is_told_when(
    proxy: RunningProxy,
    scheduler: FakeScheduler,
    status: int,
    wait_ms: int,
    kind: str,
    retry_after: str,
) -> None:
    async def refuse(request: FakeRequest) -> None:
        request.refuse(status, "overloaded", "too much", retry_after_ms=wait_ms)

    scheduler.behaviour = refuse
    response = await proxy.complete(**FIELDS)
    assert response.status_code == status
    assert response.headers["retry-after"] == retry_after
    assert response.headers["retry-after-ms"] == str(wait_ms or 1000)
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["type"] == kind


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_its_status(
    proxy: RunningProxy, scheduler: FakeScheduler, stream: bool
) -> None:
    async def time_out(request: FakeRequest) -> None:
        request.accept()
        await trio.sleep(0.02)
        request.finish(EndReason.TIMEOUT, "it waited for 30 s", 503)

    scheduler.behaviour = time_out
    response = await proxy.complete(**FIELDS, stream=stream)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "timeout"
    assert response.json()["error"]["message"] == "it waited for 30 s"


async def test_a_failure_after_some_tokens_tells_what_had_come(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.behaviour = fail(70, 71, text="its own timeout passed", status=503)
    response = await proxy.complete(**FIELDS)
    assert response.status_code == 503
    error = response.json()["error"]
    usage = error["usage"]
    assert usage["completion_tokens"] == 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2
    assert len(error["partial_text"]) == 2
    (*_, last) = await events_until_end(proxy, FIELDS)
    assert last["error"]["usage"] == usage and "partial_text" not in last["error"]


async def test_a_failure_in_a_stream_is_an_event_and_no_finish_reason(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.behaviour = fail(1, 2, text="the decode worker died", status=502)
    events = await events_until_end(proxy, FIELDS)
    assert events[-1]["error"]["message"] == "the decode worker died"
    assert events[-1]["error"]["type"] == "server_error"
    reasons = [choice["finish_reason"] for e in events[:-1] for choice in e["choices"]]
    assert set(reasons) <= {None}


async def test_a_failure_of_one_choice_ends_the_others(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    async def behave(request: FakeRequest) -> None:
        if request.prompt[0] == 2:
            await fail(5, text="no more", status=500)(request)
        else:
            await answer_and_hang([5])(request)

    scheduler.behaviour = behave
    prompts = [[1], [2], [3]]
    response = await proxy.complete(prompt=prompts, max_tokens=9)
    assert response.status_code == 500
    events = await events_until_end(proxy, {"prompt": prompts, "max_tokens": 9})
    assert events[-1]["error"]["message"] == "no more"
    with trio.fail_after(2):
        for request in scheduler.requests:
            if request.prompt[0] != 2:
                await request.cancelled.wait()


async def test_a_refusal_of_one_choice_refuses_all(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    async def behave(request: FakeRequest) -> None:
        if request.prompt[0] == 2:
            request.refuse(400, "kv_pool_exceeded", "it does not fit")
        else:
            await hang(request)

    scheduler.behaviour = behave
    response = await proxy.complete(prompt=[[1], [2]], max_tokens=9)
    assert response.status_code == 400
    with trio.fail_after(2):
        await scheduler.requests[0].cancelled.wait()


async def test_an_error_of_our_own_is_500_and_the_next_request_works(
    proxy: RunningProxy, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("prompt text")

    with monkeypatch.context() as patch:
        patch.setattr("tidegate.clients.proxy.completions.check_model", broken)
        response = await proxy.complete(**FIELDS)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "prompt text" not in response.text
    assert any(line["event"] == "internal_error" for line in proxy.logged())
    assert (await proxy.complete(**FIELDS)).status_code == 200


async def test_an_error_of_the_http_server_is_logged_without_text(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("tidegate.clients.proxy.app.App._tell", broken)
        await proxy.complete(**FIELDS)
    await until(lambda: "http server" in [line.get("where") for line in proxy.logged()])
    assert (await proxy.complete(**FIELDS)).status_code == 200


# --- The scheduler is lost ---


async def test_a_lost_scheduler_ends_streams_with_an_error(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.behaviour = answer_and_hang([1], [2])
    streams: list[Events] = [[] for _ in range(4)]
    whole: list[httpx.Response] = []

    async def read_whole() -> None:
        whole.append(await proxy.complete(**FIELDS))

    async with trio.open_nursery() as nursery:
        for events in streams:
            nursery.start_soon(events_until_end, proxy, FIELDS, events)
        nursery.start_soon(read_whole)
        await until(lambda: all(streams) and len(scheduler.requests) == 5)
        scheduler.close()
        with trio.fail_after(3):
            await proxy.ended.wait()
    assert proxy.status == 1
    assert [events[-1]["error"]["code"] for events in streams] == ["server_lost"] * 4
    assert whole[0].status_code == 503
    assert whole[0].json()["error"]["code"] == "server_lost"


# --- Being told to stop ---


async def test_running_requests_may_finish_within_the_grace(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.behaviour = answer(*[[65]] * 10, gap_s=0.05)
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            events = await proxy.stream("/v1/completions", **FIELDS | {"max_tokens": 10})
            assert events[-1]["choices"][0]["finish_reason"] == "length"

        nursery.start_soon(read)
        await until(lambda: len(scheduler.requests) == 1)
        proxy.stop.set(0)
        await trio.sleep(0.05)
        async with httpx.AsyncClient() as fresh:
            with pytest.raises(httpx.ConnectError):
                await fresh.get(f"{proxy.url}/health")
    with trio.fail_after(1):
        await proxy.ended.wait()
    assert proxy.status == 0


async def test_stopping_does_not_wait_for_a_scheduler_that_takes_nothing(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.reads = trio.Event()
    assert (await proxy.http.get("/health")).status_code == 200  # The last that it reads.
    statuses: list[int] = []

    async def ask() -> None:
        statuses.append((await proxy.complete(**FIELDS)).status_code)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)
        await trio.sleep(0.5)
        proxy.stop.set(0)
        with trio.fail_after(3):
            await proxy.ended.wait()
    assert statuses == [503] * 10


async def test_requests_that_outlast_the_grace_get_an_error(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.behaviour = answer_and_hang([1])
    streams: list[Events] = [[] for _ in range(4)]
    async with trio.open_nursery() as nursery:
        for events in streams:
            nursery.start_soon(events_until_end, proxy, FIELDS, events)
        await until(lambda: all(streams))
        began = trio.current_time()
        proxy.stop.set(0)
        await proxy.ended.wait()
    assert [events[-1]["error"]["code"] for events in streams] == ["shutting_down"] * 4
    assert trio.current_time() - began < 3
    assert proxy.status == 0
    await until(lambda: all(request.cancels for request in scheduler.requests))
