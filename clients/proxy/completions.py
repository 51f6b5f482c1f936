"""POST /v1/completions and POST /v1/chat/completions.

All checks come before any work. Both raise `ApiError`, `ClientError` and `ClientGone`.
"""

from tidegate.clients.proxy.answering import Answering
from tidegate.clients.proxy.answers import ChatShape, CompletionShape, Shape
from tidegate.clients.proxy.backend import Backend
from tidegate.clients.proxy.body import Share
from tidegate.clients.proxy.exchange import Exchange
from tidegate.clients.proxy.fields import (
    ChatFields,
    CommonFields,
    CompletionFields,
    check_model,
    decode_fields,
)
from tidegate.clients.proxy.not_built import NOT_BUILT_IN_CHAT, NOT_BUILT_IN_COMPLETIONS
from tidegate.clients.proxy.prompts import chat_prompt, completion_prompts
from tidegate.clients.proxy.tenants import tenant_of


async def complete_text(
    backend: Backend, exchange: Exchange, body: bytes, share: Share
) -> None:
    """Continue each prompt: one choice for each of them."""
    fields = decode_fields(body, CompletionFields, NOT_BUILT_IN_COMPLETIONS)
    model = backend.model
    check_model(fields, model.card)
    prompts = await completion_prompts(fields, model.tokeniser)
    share.release()
    shape = CompletionShape()
    await _answer(backend, exchange, shape, fields, prompts, fields.max_tokens)


async def complete_chat(
    backend: Backend, exchange: Exchange, body: bytes, share: Share
) -> None:
    """Answer the last message."""
    fields = decode_fields(body, ChatFields, NOT_BUILT_IN_CHAT)
    model = backend.model
    check_model(fields, model.card)
    # The new name of the field counts if both are there.
    max_tokens = fields.max_completion_tokens or fields.max_tokens
    prompt = await chat_prompt(fields.messages, max_tokens, model)
    share.release()
    await _answer(backend, exchange, ChatShape(), fields, [prompt], max_tokens)


async def _answer(
    backend: Backend,
    exchange: Exchange,
    shape: Shape,
    fields: CommonFields,
    prompts: list[list[int]],
    max_tokens: int | None,
) -> None:
    tenant = tenant_of(exchange)
    exchange.note(tenant=tenant)
    options = fields.stream_options
    answering = Answering(
        exchange,
        shape,
        backend.model.card.name,
        [backend.generate(prompt, fields, max_tokens, tenant) for prompt in prompts],
        stream=fields.stream or False,
        include_usage=options is not None and options.include_usage is True,
    )
    await answering.run()
