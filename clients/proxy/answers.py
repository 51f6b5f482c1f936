"""The JSON of answers, whole or in chunks, for completions and chats."""

from typing import Protocol

import msgspec

from tidegate.clients.result import Result
from tidegate.ipc.protocol import EndReason


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class DeltaChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: None = None


Choice = TextChoice | ChatChoice | DeltaChoice


class Answer(msgspec.Struct, frozen=True):
    """A whole answer, or one chunk of it. A chunk has no `usage` unless it was asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Shape(Protocol):
    """What differs between completions and chats."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, result: Result) -> Choice: ...

    def begin(self, index: int, text: str) -> Choice:
        """The first chunk of a choice."""
        ...

    def go_on(self, index: int, text: str) -> Choice: ...

    def end(self, index: int, reason: EndReason) -> Choice:
        """The chunk that tells why the choice ended."""
        ...


class CompletionShape:
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, index: int, result: Result) -> Choice:
        return TextChoice(index, result.text, finish_reason(result.reason))

    def begin(self, index: int, text: str) -> Choice:
        return TextChoice(index, text, None)

    def go_on(self, index: int, text: str) -> Choice:
        return TextChoice(index, text, None)

    def end(self, index: int, reason: EndReason) -> Choice:
        return TextChoice(index, "", finish_reason(reason))


class ChatShape:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, index: int, result: Result) -> Choice:
        return ChatChoice(index, ChatMessage(result.text), finish_reason(result.reason))

    def begin(self, index: int, text: str) -> Choice:
        return DeltaChoice(index, Delta("assistant", text), None)

    def go_on(self, index: int, text: str) -> Choice:
        return DeltaChoice(index, Delta(content=text), None)

    def end(self, index: int, reason: EndReason) -> Choice:
        return DeltaChoice(index, Delta(), finish_reason(reason))


def finish_reason(reason: EndReason) -> str:
    return "length" if reason is EndReason.LENGTH else "stop"


def usage_of(results: list[Result]) -> Usage:
    """All choices together."""
    prompt = sum(result.usage.prompt_tokens for result in results)
    output = sum(result.usage.output_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in results)
    return Usage(prompt, output, prompt + output, PromptDetails(cached))
