"""The prompts of a request, as token ids that fit the model's context."""

from collections.abc import Sequence
from functools import partial

from tidegate.clients.chat_prompt import ChatMessage, encode_chat
from tidegate.clients.chat_template import ChatTemplateError
from tidegate.clients.proxy.backend import ServedModel
from tidegate.clients.proxy.errors import ApiError
from tidegate.clients.proxy.fields import (
    PROMPT_COUNT_MAX,
    CompletionFields,
    MessageFields,
    bad_field,
    check_token_ids,
)
from tidegate.clients.tokeniser import Tokeniser
from tidegate.ipc.protocol import ModelCard

# OpenAI renamed the system role for some models; templates know it by its old name.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MESSAGE_CHARACTERS = 100  # What rendering one message costs, in characters to encode.


async def completion_prompts(fields: CompletionFields, tokeniser: Tokeniser) -> list[list[int]]:
    """One prompt for each choice. Raises `ApiError` 400."""
    prompts: list[list[int]] = []
    for prompt in _split_prompts(fields):
        if isinstance(prompt, str):
            ids = await tokeniser.encode_async(prompt)
        else:
            # A prompt that is too long is refused before each of its ids is looked at.
            check_context(len(prompt), fields.max_tokens, tokeniser.card)
            check_token_ids("prompt", prompt, tokeniser.card)
            ids = prompt
        if not ids:
            raise bad_field("prompt", "must have at least one token", code="empty_prompt")
        check_context(len(ids), fields.max_tokens, tokeniser.card)
        prompts.append(ids)
    return prompts


def _split_prompts(fields: CompletionFields) -> Sequence[str | list[int]]:
    """Text, a list of texts, a list of ids, or a list of lists of ids."""
    prompt = fields.prompt
    if prompt is None:
        raise bad_field("prompt", "is missing", code="missing_field")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_field("prompt", "must not be an empty list", code="empty_prompt")
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return [ids]
    texts = [part for part in prompt if isinstance(part, str)]
    lists = [part for part in prompt if isinstance(part, list)]
    if len(texts) != len(prompt) and len(lists) != len(prompt):
        raise bad_field("prompt", "must be text, a list of texts, token ids, or lists of ids")
    if len(prompt) > PROMPT_COUNT_MAX:
        raise bad_field("prompt", f"at most {PROMPT_COUNT_MAX} prompts at a time")
    return texts or lists


async def chat_prompt(
    messages: list[MessageFields] | None, max_tokens: int | None, model: ServedModel
) -> list[int]:
    """The prompt of a chat. Raises `ApiError` 400."""
    if messages is None:
        raise bad_field("messages", "is missing", code="missing_field")
    if not messages:
        raise bad_field("messages", "must have at least one message", code="empty_prompt")
    if model.template is None:
        raise ApiError(400, model.template_problem, param="messages", code="no_chat_template")
    chat = [_message(index, message) for index, message in enumerate(messages)]
    size = sum(len(message.content) + MESSAGE_CHARACTERS for message in chat)
    try:
        encode = partial(encode_chat, model.tokeniser, model.template, chat)
        ids = await model.tokeniser.run_async(encode, size)
    except ChatTemplateError as error:
        raise bad_field("messages", str(error), code="chat_template_error") from None
    if not ids:
        raise bad_field("messages", "must give at least one token", code="empty_prompt")
    check_context(len(ids), max_tokens, model.card)
    return ids


def _message(index: int, message: MessageFields) -> ChatMessage:
    path = f"messages[{index}]"
    role = ROLES.get(message.role)
    if message.role in ("tool", "function") or message.tool_calls or message.function_call:
        raise bad_field(path, "tool calls are not supported yet", code="not_supported")
    if role is None:
        known = ", ".join(ROLES)
        raise bad_field(f"{path}.role", f"must be one of {known}")
    content = message.content
    if isinstance(content, str):
        text = content
    elif isinstance(content, list):
        for place, part in enumerate(content):
            if part.type != "text":
                raise bad_field(
                    f"{path}.content[{place}].type", "only parts of type text are supported"
                )
            if part.text is None:
                raise bad_field(f"{path}.content[{place}].text", "is missing")
        text = "".join(part.text or "" for part in content)
    elif role == "assistant":
        text = ""  # An answer without text, say a refusal, is an empty one.
    else:
        raise bad_field(f"{path}.content", "must be a text or a list of parts")
    return ChatMessage(role, text, message.name)


def check_context(prompt_tokens: int, max_tokens: int | None, card: ModelCard) -> None:
    """The rule: the prompt and max_tokens together are at most the model's context."""
    needed = prompt_tokens + (1 if max_tokens is None else max_tokens)
    if needed > card.context:
        asked = "at least 1 new token" if max_tokens is None else f"max_tokens {max_tokens}"
        raise ApiError(
            400,
            f"the model's context is {card.context} tokens, but the prompt has {prompt_tokens} "
            f"and {asked} was asked for: {needed} in all",
            param="max_tokens" if prompt_tokens < card.context else "prompt",
            code="context_length_exceeded",
        )
