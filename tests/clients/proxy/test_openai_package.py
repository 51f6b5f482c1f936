"""OpenAI's own Python package against the proxy, blocking and on asyncio."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
import trio

from fakes.behaviours import answer, answer_and_hang
from fakes.fake_scheduler import FakeRequest, FakeScheduler
from fakes.running_proxy import RunningProxy
from fakes.tiny_tokenizers import byte_level
from tidegate.ipc.protocol import EndReason

TEXT = "the cat sat 你好 🦙 on the mat"
IDS = [[token_id] for token_id in byte_level().encode(TEXT).ids]
ANSWER = answer(*IDS, reason=EndReason.END_TOKEN, gap_s=0.001)
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


async def with_client(
    proxy: RunningProxy, use: Callable[[openai.AsyncOpenAI], Awaitable[None]]
) -> None:
    """Run `use` on asyncio, in a thread beside the proxy's trio."""

    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{proxy.url}/v1", api_key="x", max_retries=0
        ) as client:
            await use(client)

    with trio.fail_after(10):
        await trio.to_thread.run_sync(asyncio.run, main(), abandon_on_cancel=True)


async def test_whole_answers(proxy: RunningProxy, scheduler: FakeScheduler) -> None:
    scheduler.behaviour = ANSWER

    async def use(client: openai.AsyncOpenAI) -> None:
        completion = await client.completions.create(model="tiny", prompt="x", max_tokens=99)
        assert completion.choices[0].text == TEXT
        assert completion.usage is not None
        assert completion.usage.completion_tokens == len(IDS)
        chat = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_completion_tokens=99, stop=["mat"]
        )
        assert chat.choices[0].message.content == TEXT.removesuffix("mat")
        assert chat.choices[0].finish_reason == "stop"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"

    await with_client(proxy, use)


async def test_streams(proxy: RunningProxy, scheduler: FakeScheduler) -> None:
    scheduler.behaviour = ANSWER

    async def use(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(
            model="tiny", prompt="x", max_tokens=99, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT
        chats = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=99,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in chats]
        deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(deltas) == TEXT
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert counts == [len(IDS)]

    await with_client(proxy, use)


async def test_closing_a_stream_cancels(proxy: RunningProxy, scheduler: FakeScheduler) -> None:
    scheduler.behaviour = answer_and_hang([65])

    async def use(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        async for _ in stream:
            break
        await stream.close()

    await with_client(proxy, use)
    with trio.fail_after(2):
        await scheduler.requests[0].cancelled.wait()


async def test_errors_are_of_the_packages_types(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    async def refuse(request: FakeRequest) -> None:
        request.refuse(429, "overloaded", "too much")

    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.completions.create(model="gpt-4", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model="tiny", prompt="x", temperature=3)
        scheduler.behaviour = refuse
        with pytest.raises(openai.RateLimitError, match="too much"):
            await client.completions.create(model="tiny", prompt="x")

    await with_client(proxy, use)


async def test_blocking(proxy: RunningProxy, scheduler: FakeScheduler) -> None:
    scheduler.behaviour = ANSWER

    def use() -> None:
        with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="x", max_retries=0) as client:
            chat = client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=99
            )
            assert chat.choices[0].message.content == TEXT
            stream = client.completions.create(
                model="tiny", prompt="x", max_tokens=99, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == TEXT

    with trio.fail_after(10):
        await trio.to_thread.run_sync(use, abandon_on_cancel=True)
