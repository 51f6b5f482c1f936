"""What good requests get, streamed and not."""

import re
from typing import Any

import pytest
import trio

from fakes.behaviours import answer, answer_and_hang
from fakes.fake_scheduler import FakeRequest, FakeScheduler
from fakes.running_proxy import RunningProxy, text_of
from fakes.tiny_tokenizers import END, byte_level
from tidegate.ipc.protocol import EndReason

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ENDPOINTS = [
    ("/v1/completions", {"prompt": "the cat"}),
    ("/v1/chat/completions", CHAT),
]
CANCEL_S_MAX = 10.0
MANY_TOKEN_TEXT = "👩🏽‍🚀🦙 ďábelské 你好 한국어 🇧🇷"


def ids_of(text: str) -> list[int]:
    return byte_level().encode(text).ids


def one_by_one(text: str) -> list[list[int]]:
    return [[token_id] for token_id in ids_of(text)]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def message_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def test_a_completion_has_the_fields_of_openai(proxy: RunningProxy) -> None:
    response = await proxy.complete(model="tiny", prompt="the cat", max_tokens=5)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    whole = response.json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{16}-e1-1", whole.pop("id"))
    assert whole.pop("created") > 1_700_000_000
    prompt_tokens = len(ids_of("the cat"))
    assert whole == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "the cat sat on the",
                "finish_reason": "length",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 5,
            "total_tokens": prompt_tokens + 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_chat_has_the_fields_of_openai(proxy: RunningProxy) -> None:
    whole = (await proxy.chat(**CHAT, max_tokens=2)).json()
    assert whole["id"].startswith("chatcmpl-")
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "the cat", "refusal": None},
            "finish_reason": "length",
            "logprobs": None,
        }
    ]


@pytest.mark.parametrize(("path", "fields"), ENDPOINTS)
@pytest.mark.parametrize("include_usage", [True, False, None])
async def test_a_stream_is_well_formed(
    proxy: RunningProxy,
    scheduler: FakeScheduler,
    path: str,
    fields: dict[str, Any],
    include_usage: bool | None,
) -> None:
    scheduler.behaviour = answer(*one_by_one("the cat sat"), gap_s=0.005)
    options = None if include_usage is None else {"include_usage": include_usage}
    events = await proxy.stream(path, **fields, max_tokens=5, stream_options=options)
    assert len({(event["id"], event["model"], event["created"]) for event in events}) == 1
    if include_usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(ids_of("the cat sat"))
        assert all(event["usage"] is None for event in events)
    else:
        assert all("usage" not in event for event in events)
    choices = [event["choices"] for event in events]
    assert all(len(choice) == 1 for choice in choices)
    reasons = [choice[0]["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    if path.endswith("chat/completions"):
        roles = [choice[0]["delta"].get("role") for choice in choices]
        assert roles == ["assistant"] + [None] * (len(roles) - 1)
    assert len(events) > 2
    assert text_of(events) == "the cat sat"


@pytest.mark.parametrize(("path", "fields"), ENDPOINTS)
@pytest.mark.parametrize("text", [MANY_TOKEN_TEXT, "the cat", ""])
@pytest.mark.parametrize("cut", [0, 1])
async def test_streamed_and_whole_answers_are_the_same(
    proxy: RunningProxy,
    scheduler: FakeScheduler,
    path: str,
    fields: dict[str, Any],
    text: str,
    cut: int,
) -> None:
    frames = one_by_one(text)[: len(ids_of(text)) - cut]
    scheduler.behaviour = answer(*frames)
    whole = (await proxy.http.post(path, json={**fields, "max_tokens": 99})).json()
    events = await proxy.stream(
        path, **fields, max_tokens=99, stream_options={"include_usage": True}
    )
    assert text_of(events) == message_of(whole["choices"][0])
    assert text_of(events) == byte_level().decode([i for frame in frames for i in frame])
    assert events[-1]["usage"] == whole["usage"]
    usage = whole["usage"]
    assert usage["completion_tokens"] == len(frames)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(frames)


@pytest.mark.parametrize(("path", "fields"), ENDPOINTS)
@pytest.mark.parametrize("stop", ["at s", ["zzz", "at s"], ["at sat", "t s", "at s"]])
async def test_a_stop_string_cuts_both_alike(
    proxy: RunningProxy,
    scheduler: FakeScheduler,
    path: str,
    fields: dict[str, Any],
    stop: object,
) -> None:
    letters = [[byte_level().get_vocab()[letter]] for letter in "theĠcatĠsatĠon"]
    # It does not end before it is cancelled.
    scheduler.behaviour = answer_and_hang(*letters)
    body = {**fields, "max_tokens": 99, "stop": stop}
    whole = (await proxy.http.post(path, json=body)).json()
    events = await proxy.stream(path, **fields, max_tokens=99, stop=stop)
    for request in scheduler.requests:
        with trio.fail_after(CANCEL_S_MAX):
            await request.cancelled.wait()
        assert request.cancels[0].reason is EndReason.STOP_TEXT
    assert message_of(whole["choices"][0]) == text_of(events) == "the c"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == scheduler.requests[0].cancels[0].kept


async def test_no_event_holds_anything_behind_the_cut(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    text = "Here: A, B, C, D, E, F"
    scheduler.behaviour = answer(*one_by_one(text), gap_s=0.001)
    for begin in range(0, len(text) - 8, 3):
        stop = text[begin : begin + 8]
        cut = text[: text.index(stop)]
        events = await proxy.stream("/v1/completions", prompt="x", max_tokens=99, stop=[stop])
        shown = ""
        for event in events:
            shown += event["choices"][0]["text"]
            assert cut.startswith(shown)
        assert shown == cut


@pytest.mark.parametrize(
    ("reason", "finish_reason"),
    [
        (EndReason.END_TOKEN, "stop"),
        (EndReason.STOP_ID, "stop"),
        (EndReason.LENGTH, "length"),
    ],
)
async def test_finish_reasons(
    proxy: RunningProxy, scheduler: FakeScheduler, reason: EndReason, finish_reason: str
) -> None:
    end = byte_level().get_vocab()[END]
    scheduler.behaviour = answer([*ids_of("the cat"), end], reason=reason)
    choice = (await proxy.complete(prompt="x", max_tokens=99)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("the cat", finish_reason)


async def test_stop_ids_are_not_shown(proxy: RunningProxy, scheduler: FakeScheduler) -> None:
    ids = ids_of("the cat")
    scheduler.behaviour = answer(ids, reason=EndReason.STOP_ID)
    fields = {"prompt": "x", "max_tokens": 99, "stop_token_ids": [ids[-1]]}
    choice = (await proxy.complete(**fields)).json()["choices"][0]
    assert choice["text"] == byte_level().decode(ids[:-1])


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("the cat", [ids_of("the cat")]),
        (["the cat", "the dog"], [ids_of("the cat"), ids_of("the dog")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_kind_of_prompt(
    proxy: RunningProxy, scheduler: FakeScheduler, prompt: object, sent: list[Any]
) -> None:
    response = await proxy.complete(prompt=prompt, max_tokens=2)
    assert response.status_code == 200
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(sent)))
    assert [list(request.prompt) for request in scheduler.requests] == sent


async def test_control_tokens_in_a_prompt_or_message_are_text(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    end = byte_level().get_vocab()[END]
    await proxy.complete(prompt=f"a{END}", max_tokens=1)
    for content in ("a", f"a{END}", [part(f"a{END[:4]}"), part(END[4:])]):
        await proxy.chat(messages=[{"role": "user", "content": content}], max_tokens=1)
    counts = [list(request.prompt).count(end) for request in scheduler.requests]
    assert counts[0] == 0
    assert counts[1] == counts[2] == counts[3] > 0


async def test_choices_of_several_prompts_stay_apart(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    async def behave(request: FakeRequest) -> None:
        await answer(*[[request.prompt[0]]] * 4, gap_s=0.003)(request)

    scheduler.behaviour = behave
    letters = byte_level().get_vocab()
    prompts = [[letters[letter]] for letter in "abc"]
    events = await proxy.stream(
        "/v1/completions", prompt=prompts, max_tokens=4, stream_options={"include_usage": True}
    )
    assert [text_of(events, index) for index in range(3)] == ["aaaa", "bbbb", "cccc"]
    reasons = [
        (choice["index"], choice["finish_reason"])
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(reasons) == [(0, "length"), (1, "length"), (2, "length")]
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 12)
    assert (usage["total_tokens"], usage["prompt_tokens_details"]) == (15, {"cached_tokens": 0})
    whole = (await proxy.complete(prompt=prompts, max_tokens=4)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["aaaa", "bbbb", "cccc"]
    assert whole["usage"] == usage


async def test_tokens_that_gather_go_out_in_one_event(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.behaviour = answer([ids_of("the cat sat on the mat")[0]], ids_of("the cat " * 10))
    events = await proxy.stream("/v1/completions", prompt="x", max_tokens=99)
    assert len(events) <= 4


async def test_line_ends_of_other_alphabets_do_not_break_events(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    text = "a\u2028b\x85c\u2029d\r\ne"
    scheduler.behaviour = answer(*one_by_one(text))
    # Splitting into lines as Python does it would end a line at each of them.
    events = await proxy.stream("/v1/completions", prompt="x", max_tokens=99)
    assert text_of(events) == text


async def test_sampling_reaches_the_scheduler(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    await proxy.complete(prompt="x", max_tokens=1)
    fields = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": -5}
    await proxy.complete(prompt="x", max_tokens=1, **fields, ignore_eos=True)
    await proxy.complete(prompt="x", max_tokens=1, top_p=0, top_k=-1, temperature=5e-324)
    first, second, third = (request.submit for request in scheduler.requests)
    assert (first.sampling.temperature, first.seed, first.ignore_eos) == (1.0, None, False)
    assert (second.sampling.temperature, second.sampling.top_p) == (0.25, 0.5)
    assert (second.sampling.top_k, second.sampling.min_p, second.seed) == (7, 0.1, -5)
    assert second.ignore_eos
    assert (third.sampling.top_k, third.sampling.top_p) == (1, 1.0)  # Greedy.
    assert third.sampling.temperature == 5e-324


async def test_absent_max_tokens_is_left_to_the_scheduler(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    whole = (await proxy.complete(prompt="x")).json()
    assert scheduler.requests[0].submit.max_tokens is None
    assert whole["usage"]["completion_tokens"] == 16
    await proxy.chat(**CHAT, max_tokens=3, max_completion_tokens=2)
    await proxy.chat(**CHAT, max_tokens=3)
    assert [r.submit.max_tokens for r in scheduler.requests[1:]] == [2, 3]


async def test_ids_join_the_answer_to_the_logs(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    response = await proxy.http.post(
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 1, "request_id": "mine"},
        headers={"x-request-id": "mine"},
    )
    name = response.headers["x-request-id"]
    assert name != "mine"
    assert response.headers["x-tidegate-request"] == "e1-1"
    line = await proxy.line_of(response)
    assert (line["request_id"], line["status"], line["output_tokens"]) == ("e1-1", 200, 1)


async def test_no_text_of_a_request_is_logged(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    canary = "canary7f3a"
    scheduler.behaviour = answer(*one_by_one(canary))
    messages = [{"role": "user", "content": canary}]
    await proxy.complete(prompt=canary, max_tokens=99, stop=canary)
    await proxy.chat(messages=messages, max_tokens=99)
    await proxy.chat(messages=messages, max_tokens=99, stop=["", canary])
    await proxy.complete(prompt=canary, model=canary)
    await proxy.http.post("/v1/completions", content=canary)
    await proxy.line_of(await proxy.complete(prompt="x", max_tokens=1))
    assert canary not in str(proxy.logged())
