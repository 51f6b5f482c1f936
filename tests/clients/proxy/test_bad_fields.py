"""Every wrong field has a 400 that names it, before any work, and the next request works."""

from typing import Any

import pytest

from fakes.fake_scheduler import FakeScheduler
from fakes.running_proxy import RunningProxy

MESSAGE = {"role": "user", "content": "hi"}
CHAT = {"messages": [MESSAGE], "max_tokens": 1}
COMPLETION = {"prompt": "x", "max_tokens": 1}
CONTEXT, VOCABULARY = 256, 422


def parts(*each: object) -> dict[str, object]:
    return {"role": "user", "content": list(each)}


BOTH: list[tuple[str, object]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 2**31),
    ("max_tokens", 10**30),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", [1]),
    ("top_p", -0.1),
    ("top_p", 1.0000001),
    ("top_p", 2),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.1),
    ("min_p", -1),
    ("seed", "x"),
    ("seed", 2**63),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["", "\u0001never"]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop", ["x"] * 17),
    ("stop", "x" * 1025),
    ("stop_token_ids", [VOCABULARY]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "1"),
    ("timeout_ms", 0),
    ("timeout_ms", "1s"),
    ("timeout_ms", 604_800_001),
    ("total_timeout_ms", -5),
    ("total_timeout_ms", 1.5),
    ("ignore_eos", "yes"),
    ("ignore_eos", 1),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("model", 5),
    ("user", 5),
    ("n", 0),
    ("n", 2),
    ("n", "1"),
    ("n", True),
    ("presence_penalty", 0.5),
    ("frequency_penalty", -0.5),
    ("frequency_penalty", "x"),
    ("repetition_penalty", 1.1),
    ("logit_bias", {"99999999": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 5}),
    ("logit_bias", {"5": None}),
    ("logit_bias", []),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "bogus"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}),
    ("min_tokens", 1),
    ("guided_json", {}),
    ("logprobs", 3),
    ("logprobs", 1000000),
    ("logprobs", True),
]
COMPLETIONS: list[tuple[str, object]] = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", [""]),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [[1], []]),
    ("prompt", 5),
    ("prompt", {"a": "b"}),
    ("prompt", [1, "a"]),
    ("prompt", [[1], 1]),
    ("prompt", [None]),
    ("prompt", [True]),
    ("prompt", [1.5]),
    ("prompt", [-1]),
    ("prompt", [VOCABULARY]),
    ("prompt", [999999]),
    ("prompt", [2147483648]),
    ("prompt", [9223372036854775808]),
    ("prompt", [10**30]),
    ("prompt", [[1], [999999]]),
    ("prompt", ["x"] * 129),
    ("best_of", 2),
    ("echo", True),
    ("suffix", "x"),
    ("logprobs", 0),
]
CHATS: list[tuple[str, object]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", [5]),
    ("messages[0]", [{"content": "hi"}]),
    ("messages[0].role", [{"role": "wizard", "content": "hi"}]),
    ("messages[0].role", [{"role": "User", "content": "hi"}]),
    ("messages[0].role", [{"role": 5, "content": "hi"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": None}]),
    ("messages[0].content", [{"role": "system"}]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[0].content[0]", [{"role": "user", "content": ["hi"]}]),
    ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages[0].content[0].text", [parts({"type": "text", "text": 5})]),
    ("messages[0].content[0]", [{"role": "user", "content": [{"text": "hi"}]}]),
    (
        "messages[1].content[0].type",
        [MESSAGE, parts({"type": "image_url", "image_url": {"url": "x"}})],
    ),
    ("messages[0].name", [{"role": "user", "content": "hi", "name": 5}]),
    ("messages[1]", [MESSAGE, {"role": "tool", "content": "x", "tool_call_id": "1"}]),
    ("messages[1]", [MESSAGE, {"role": "assistant", "tool_calls": [{"id": "1"}]}]),
    ("max_completion_tokens", 0),
    ("top_logprobs", 3),
    ("top_logprobs", 1000000),
    ("top_logprobs", -1),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("modalities", ["audio"]),
    ("audio", {"voice": "x"}),
    ("reasoning_effort", "high"),
]


async def check(proxy: RunningProxy, path: str, param: str, fields: dict[str, Any]) -> None:
    response = await proxy.http.post(path, json=fields)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0] in error["message"]
    assert error["param"].startswith(param)


async def test_wrong_fields_are_named(proxy: RunningProxy, scheduler: FakeScheduler) -> None:
    for name, value in BOTH + COMPLETIONS:
        await check(proxy, "/v1/completions", name, {**COMPLETION, name: value})
    for name, value in BOTH + CHATS:
        field = name.split("[")[0]
        await check(proxy, "/v1/chat/completions", name, {**CHAT, field: value})
    assert not scheduler.requests
    assert (await proxy.complete(**COMPLETION)).status_code == 200
    assert (await proxy.chat(**CHAT)).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": None, "temperature": None, "stop": None, "max_tokens": None, "stream": None},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"stop": []},
        {"stop": ["a", "b", "c", "d"]},
        {"seed": 2**63 - 1},
        {"user": "u1", "metadata": {}, "store": False, "foo": {"a": [1]}},
        {"response_format": {"type": "text"}},
        {"stream_options": None},
        {"service_tier": "auto", "parallel_tool_calls": True},
    ],
)
async def test_fields_that_ask_for_nothing_special_are_accepted(
    proxy: RunningProxy, fields: dict[str, object]
) -> None:
    completion = await proxy.complete(**{**COMPLETION, **fields, "best_of": 1, "echo": False})
    assert completion.status_code == 200, completion.text
    chat = await proxy.chat(
        **{**CHAT, **fields, "logprobs": False, "tools": [], "tool_choice": "auto"}
    )
    assert chat.status_code == 200, chat.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"model":"tiny",}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":1e999}',
        b"[" * 100_000,
        b'{"foo":' + b"[" * 100_000,
        b"prompt=x&max_tokens=1",
        b"\xef\xbb\xbf{}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_body_that_is_no_json_object(
    proxy: RunningProxy, path: str, body: bytes
) -> None:
    headers = {"content-type": "application/json"}
    response = await proxy.http.post(path, content=body, headers=headers)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_of_another_type(proxy: RunningProxy, kind: str) -> None:
    body = b'{"prompt":"x","max_tokens":1}'
    headers = {"content-type": kind}
    response = await proxy.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 415
    assert "Content-Type: application/json" in response.json()["error"]["message"]
    headers = {"content-type": "application/json; charset=utf-8"}
    response = await proxy.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 200


async def test_a_model_that_is_not_served(proxy: RunningProxy) -> None:
    for response in (
        await proxy.complete(**COMPLETION, model="gpt-4"),
        await proxy.chat(**CHAT, model=""),
        await proxy.http.get("/v1/models/gpt-4"),
    ):
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'tiny'" in error["message"]


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "status"),
    [
        (CONTEXT - 8, 4, 200),
        (CONTEXT - 8, 8, 200),
        (CONTEXT - 8, 9, 400),
        (CONTEXT - 8, 100_000, 400),
        (CONTEXT - 1, None, 200),
        (CONTEXT - 1, 1, 200),
        (CONTEXT, 1, 400),
        (CONTEXT, None, 400),
        (CONTEXT + 1, None, 400),
        (CONTEXT * 10, 1, 400),
    ],
)
async def test_prompt_and_max_tokens_fit_the_context_together(
    proxy: RunningProxy, prompt_tokens: int, max_tokens: int | None, status: int
) -> None:
    response = await proxy.complete(prompt=[1] * prompt_tokens, max_tokens=max_tokens)
    assert response.status_code == status
    if status == 400:
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f" {CONTEXT} tokens" in error["message"]
        assert f" {prompt_tokens} " in error["message"]
    else:
        assert response.json()["usage"]["prompt_tokens"] == prompt_tokens


async def test_a_long_text_is_never_cut(proxy: RunningProxy, scheduler: FakeScheduler) -> None:
    text = "word " * (2 * CONTEXT)
    for response in (
        await proxy.complete(prompt=text, max_tokens=8),
        await proxy.chat(messages=[{"role": "user", "content": text}], max_tokens=8),
    ):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not scheduler.requests
