"""What is served, whether a token can flow, and where there is nothing."""

from pathlib import Path

import pytest

from fakes.fake_scheduler import FakeScheduler, open_fake_scheduler
from fakes.running_proxy import RunningProxy, open_proxy


async def test_models(proxy: RunningProxy) -> None:
    listed = (await proxy.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)
    assert (await proxy.http.get("/v1/models/tiny")).json() == model


async def test_health_tells_the_pools(proxy: RunningProxy) -> None:
    response = await proxy.http.get("/health")
    assert response.status_code == 200
    health = response.json()
    assert (health["status"], health["model"]) == ("ready", "tiny")
    assert (health["longest_prompt"], health["default_max_tokens"]) == (255, 16)
    assert health["pools"] == [
        {
            "worker": "w1",
            "role": "both",
            "pool": "full",
            "page_tokens": 16,
            "page_bytes": 1024,
            "page_count": 64,
            "free_count": 60,
            "cached_count": 4,
        }
    ]


async def test_health_is_503_with_the_reason_when_no_token_can_flow(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.ready_reason = "no decode worker has joined"
    response = await proxy.http.get("/health")
    assert response.status_code == 503
    assert response.json()["status"] == "not_ready"
    assert response.json()["reason"] == "no decode worker has joined"
    scheduler.ready_reason = ""
    assert (await proxy.http.get("/health")).status_code == 200


async def test_health_is_503_when_the_scheduler_does_not_answer(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.answers_questions = False
    response = await proxy.http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "scheduler_silent"


async def test_before_a_worker_has_joined_all_is_503(
    socket_folder: Path, tmp_path: Path, scheduler: FakeScheduler
) -> None:
    folder = socket_folder / "b"
    folder.mkdir()
    async with (
        open_fake_scheduler(folder, None) as empty,
        open_proxy(empty, tmp_path / "log") as proxy,
    ):
        empty.ready_reason = "no worker has joined yet"
        empty.answer = [1]
        for response in (
            await proxy.complete(prompt="x"),
            await proxy.chat(messages=[{"role": "user", "content": "x"}]),
            await proxy.http.get("/v1/models"),
        ):
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "not_ready"
        assert (await proxy.http.get("/health")).status_code == 503
        empty.card, empty.ready_reason = scheduler.card, ""
        await proxy.wait_ready()
        assert (await proxy.complete(prompt="x", max_tokens=1)).status_code == 200
        assert (await proxy.http.get("/health")).status_code == 200


async def test_the_root_points_to_the_api(proxy: RunningProxy) -> None:
    assert (await proxy.http.get("/")).json()["models"] == "/v1/models"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nothing"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1"),
        ("GET", "/v1/models/"),
        ("DELETE", "/%2e%2e/etc"),
    ],
)
async def test_unknown_paths(proxy: RunningProxy, method: str, path: str) -> None:
    response = await proxy.http.request(method, path, json={"x": 1})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
async def test_wrong_methods(proxy: RunningProxy, method: str, path: str, allowed: str) -> None:
    response = await proxy.http.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    assert response.json()["error"]["code"] == "method_not_allowed"


async def test_head_has_no_body(proxy: RunningProxy) -> None:
    response = await proxy.http.head("/health")
    assert response.status_code == 200
    assert response.content == b""
    assert (await proxy.http.get("/health")).status_code == 200
