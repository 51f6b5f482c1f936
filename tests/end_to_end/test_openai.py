"""The `openai` package against real servers: what its users see."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from end_to_end.serving import Server, serve

CHAT = "smollm2-135m"
BASE = "gemma3-270m"
ALPHABET = "Here is the English alphabet: A, B, C,"
MULTI_BYTE = "👩🏽‍🚀🦙 ďábelské 你好 한국어 🇧🇷 " * 4


@pytest.fixture(scope="module")
def chat_server() -> Iterator[Server]:
    with serve(CHAT, "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def base_server() -> Iterator[Server]:
    with serve(BASE) as server:
        yield server


@pytest.fixture(params=[CHAT, BASE])
def any_server(request: pytest.FixtureRequest) -> tuple[str, Server]:
    name = "chat_server" if request.param == CHAT else "base_server"
    server = request.getfixturevalue(name)
    assert isinstance(server, Server)
    return server.model, server


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, model: str, prompt: str, **options: Any) -> Any:
    # The package's overloads tell streams by a literal, which options of any kind hide.
    create: Any = client.completions.create
    return create(model=model, prompt=prompt, temperature=0, **options)


def streamed(client: openai.OpenAI, model: str, prompt: str, **options: Any) -> tuple[str, Any]:
    """The joined text, and the last chunk that has a choice."""
    text, last = "", None
    for chunk in complete(client, model, prompt, stream=True, **options):
        if chunk.choices:
            text += chunk.choices[0].text
            last = chunk
    return text, last


def test_a_chat_is_answered_blocking_and_streamed(chat_server: Server) -> None:
    question: ChatCompletionUserMessageParam = {
        "role": "user",
        "content": "What is the capital of France?",
    }
    with client_of(chat_server) as client:
        whole = client.chat.completions.create(
            model=CHAT, messages=[question], temperature=0, max_tokens=24
        )
        assert "Paris" in (whole.choices[0].message.content or "")
        assert whole.choices[0].finish_reason == "stop"
        text = ""
        for chunk in client.chat.completions.create(
            model=CHAT, messages=[question], temperature=0, max_tokens=24, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        assert text == whole.choices[0].message.content


# The package leaves its own generators at [DONE] without closing them, which trio reports.
@pytest.mark.filterwarnings("ignore:.*garbage collected before it had been exhausted.*")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_the_asynchronous_client_streams(chat_server: Server) -> None:
    # The package's asynchronous client runs under trio through anyio.
    async with openai.AsyncOpenAI(base_url=f"{chat_server.url}/v1", api_key="none") as client:
        stream = await client.completions.create(
            model=CHAT, prompt="Once upon a time", max_tokens=16, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].text async for chunk in stream if chunk.choices]
        whole = await client.completions.create(
            model=CHAT, prompt="Once upon a time", max_tokens=16, temperature=0
        )
    assert "".join(pieces) == whole.choices[0].text
    assert len(pieces) > 2


def test_a_stop_string_over_token_edges_is_cut_exactly(any_server: tuple[str, Server]) -> None:
    model, server = any_server
    with client_of(server) as client:
        free = complete(client, model, ALPHABET, max_tokens=48).choices[0].text
        for begin, end in ((5, 13), (3, 4), (11, 25)):
            stop = free[begin:end]
            expected = free[: free.index(stop)]
            whole = complete(client, model, ALPHABET, max_tokens=48, stop=[stop])
            assert whole.choices[0].text == expected
            assert whole.choices[0].finish_reason == "stop"
            text, last = streamed(client, model, ALPHABET, max_tokens=48, stop=[stop])
            assert text == expected
            assert last.choices[0].finish_reason == "stop"


def test_characters_over_token_edges_come_whole(any_server: tuple[str, Server]) -> None:
    model, server = any_server
    with client_of(server) as client:
        whole = complete(client, model, MULTI_BYTE, max_tokens=48)
        text, last = streamed(client, model, MULTI_BYTE, max_tokens=48)
        assert text == whole.choices[0].text
        assert last.choices[0].finish_reason == whole.choices[0].finish_reason


def test_usage_adds_up_and_is_the_same_streamed(any_server: tuple[str, Server]) -> None:
    model, server = any_server
    with client_of(server) as client:
        whole = complete(client, model, ALPHABET, max_tokens=20).usage
        chunks = list(
            complete(
                client,
                model,
                ALPHABET,
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole
    assert whole.total_tokens == whole.prompt_tokens + whole.completion_tokens
    assert whole.completion_tokens == 20


def test_a_chat_with_a_base_model_is_a_clear_400(base_server: Server) -> None:
    with client_of(base_server) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=BASE, messages=messages)
        assert "--chat-template" in str(caught.value)
        assert complete(client, BASE, "The days of the week are", max_tokens=4).choices[0].text


def test_a_seed_gives_one_text_whoever_else_runs(chat_server: Server) -> None:
    with client_of(chat_server) as client:

        def ask(seed: int) -> str:
            answer = client.completions.create(
                model=CHAT, prompt="A short story:", max_tokens=24, temperature=1, seed=seed
            )
            return answer.choices[0].text

        alone = ask(42)
        with client.completions.create(
            model=CHAT, prompt="Another one:", max_tokens=400, stream=True
        ) as stream:
            next(iter(stream))
            assert ask(42) == alone
        assert ask(43) != alone


def test_bad_requests_are_told_apart_and_the_next_good_one_works(chat_server: Server) -> None:
    url = f"{chat_server.url}/v1/completions"
    bad: list[tuple[int, dict[str, Any]]] = [
        (400, {"prompt": ""}),
        (400, {"prompt": [999_999]}),
        (400, {"prompt": "hi", "max_tokens": 0}),
        (400, {"prompt": "hi", "temperature": -1}),
        (400, {"prompt": "hi", "stop": [""]}),
        (400, {"prompt": "hi", "n": 3}),
        (400, {"prompt": [5] * 8192, "max_tokens": 8}),
        (404, {"prompt": "hi", "model": "another"}),
    ]
    for status, fields in bad:
        answer = httpx.post(url, json={"model": CHAT, **fields}, timeout=30)
        assert answer.status_code == status, (fields, answer.text)
        assert answer.json()["error"]["message"]
        good = httpx.post(
            url, json={"model": CHAT, "prompt": "hi", "max_tokens": 1}, timeout=30
        )
        assert good.status_code == 200
    chat_server.wait_until_all_pages_are_free()
