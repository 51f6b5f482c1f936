"""Messages of a chat, and models without a chat template."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.cards import card_of
from fakes.fake_scheduler import FakeScheduler, open_fake_scheduler
from fakes.running_proxy import RunningProxy, open_proxy
from fakes.templates import ALTERNATING, CHATML
from fakes.tiny_tokenizers import byte_level
from tidegate.clients.proxy.settings import ProxySettings

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "hi"}
AGAIN: Message = {"role": "user", "content": "again"}
ASSISTANT: Message = {"role": "assistant", "content": "hello"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}


async def prompt_of(
    proxy: RunningProxy, scheduler: FakeScheduler, messages: list[Message]
) -> tuple[int, ...]:
    response = await proxy.chat(messages=messages, max_tokens=1)
    assert response.status_code == 200, response.text
    return scheduler.requests[-1].prompt


async def test_the_template_makes_the_prompt(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    prompt = await prompt_of(proxy, scheduler, [SYSTEM, USER, ASSISTANT, AGAIN])
    assert byte_level().decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, USER],
        [SYSTEM, SYSTEM, USER],
        [USER, USER],
        [ASSISTANT, USER],
        [SYSTEM],
        [USER, ASSISTANT],
        [{**USER, "name": "bob", "id": 7, "foo": None}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
    ],
)
async def test_any_order_of_roles_that_the_template_takes(
    proxy: RunningProxy, scheduler: FakeScheduler, messages: list[Message]
) -> None:
    assert await prompt_of(proxy, scheduler, messages)


async def test_null_content_of_an_assistant_is_empty(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    variants: list[Message] = [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
    ]
    prompts = {await prompt_of(proxy, scheduler, [USER, each, AGAIN]) for each in variants}
    assert len(prompts) == 1


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
async def test_text_parts_are_joined(
    proxy: RunningProxy, scheduler: FakeScheduler, role: str
) -> None:
    parts = [{"type": "text", "text": "ALPHA one "}, {"type": "text", "text": "BETA two"}]
    apart = await prompt_of(proxy, scheduler, [{"role": role, "content": parts}, USER])
    whole: Message = {"role": role, "content": "ALPHA one BETA two"}
    assert apart == await prompt_of(proxy, scheduler, [whole, USER])


async def test_a_developer_is_the_system(proxy: RunningProxy, scheduler: FakeScheduler) -> None:
    developer: Message = {**SYSTEM, "role": "developer"}
    assert await prompt_of(proxy, scheduler, [developer, USER]) == await prompt_of(
        proxy, scheduler, [SYSTEM, USER]
    )


async def test_a_refusal_of_the_template_is_told(socket_folder: Path, tmp_path: Path) -> None:
    card = card_of(byte_level(), chat_template=ALTERNATING)
    async with open_fake_scheduler(socket_folder, card) as scheduler:
        scheduler.answer = [1]
        async with open_proxy(scheduler, tmp_path / "log") as proxy:
            response = await proxy.chat(messages=[USER, USER], max_tokens=1)
            assert response.status_code == 400
            error = response.json()["error"]
            assert "roles must alternate user/assistant" in error["message"]
            assert error["code"] == "chat_template_error"
            good = await proxy.chat(messages=[USER, ASSISTANT, USER], max_tokens=1)
            assert good.status_code == 200


async def test_a_model_without_a_template_says_how_to_give_one(
    socket_folder: Path, tmp_path: Path
) -> None:
    async with open_fake_scheduler(socket_folder, card_of(byte_level())) as scheduler:
        scheduler.answer = [1]
        async with open_proxy(scheduler, tmp_path / "log") as proxy:
            response = await proxy.chat(messages=[USER], max_tokens=1)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "no_chat_template"
            assert "--chat-template FILE" in error["message"]
            assert (await proxy.complete(prompt="x", max_tokens=1)).status_code == 200
        settings = ProxySettings(chat_template=CHATML)
        async with open_proxy(scheduler, tmp_path / "log", settings) as proxy:
            assert (await proxy.chat(messages=[USER], max_tokens=1)).status_code == 200


async def test_a_template_that_does_not_parse_is_told(
    scheduler: FakeScheduler, tmp_path: Path
) -> None:
    assert scheduler.card is not None
    scheduler.card = msgspec.structs.replace(scheduler.card, chat_template="{% if %}")
    async with open_proxy(scheduler, tmp_path / "log") as proxy:
        response = await proxy.chat(messages=[USER], max_tokens=1)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "does not parse" in message
        assert "--chat-template FILE" in message
