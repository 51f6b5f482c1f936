"""The fields of a completion or chat request: their types, their ranges, and what is missing.

A field of OpenAI's API that is not built yet is refused by name unless it has the value that
changes nothing. Fields that the API does not know are ignored.
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tidegate.clients.proxy.errors import ApiError
from tidegate.clients.proxy.not_built import NotBuilt
from tidegate.ipc.protocol import ModelCard, Sampling

STOP_COUNT_MAX = 16
STOP_LENGTH_MAX = 1024  # Characters.
CACHE_SALT_LENGTH_MAX = 256
STOP_ID_COUNT_MAX = 256
PROMPT_COUNT_MAX = 128  # Prompts of one request, each with a choice of its own.
MAX_TOKENS_MAX = 2**31 - 1
TIMEOUT_MS_MAX = 7 * 24 * 3600 * 1000
TEMPERATURE_MAX = 2.0
TEMPERATURE_DEFAULT = 1.0  # As in OpenAI's API.

StopText = Annotated[str, Meta(min_length=1, max_length=STOP_LENGTH_MAX)]
StopTexts = Annotated[list[StopText], Meta(max_length=STOP_COUNT_MAX)]
TokenId = Annotated[int, Meta(ge=0)]
StopIds = Annotated[list[TokenId], Meta(max_length=STOP_ID_COUNT_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
CacheSalt = Annotated[str, Meta(max_length=CACHE_SALT_LENGTH_MAX)]
TimeoutMs = Annotated[int, Meta(ge=1, le=TIMEOUT_MS_MAX)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(Struct):
    include_usage: bool | None = None


class CommonFields(Struct):
    """What completions and chats share. None is the same as an absent field."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=TEMPERATURE_MAX)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: CacheSalt | None = None
    timeout_ms: TimeoutMs | None = None
    total_timeout_ms: TimeoutMs | None = None


class CompletionFields(CommonFields):
    prompt: str | list[str | int | list[int]] | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None


class MessageFields(Struct):
    role: str
    content: str | list[ContentPart] | UnsetType | None = UNSET
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None


class ChatFields(CommonFields):
    messages: list[MessageFields] | None = None
    max_completion_tokens: TokenCount | None = None


Fields = TypeVar("Fields", bound=CommonFields)
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def decode_fields(body: bytes, kind: type[Fields], not_built: NotBuilt) -> Fields:
    """The body's fields. Raises `ApiError` 400, which names the field that is wrong."""
    try:
        raw = _decode_raw(body)
        for name, accepted in not_built.items():
            value = msgspec.json.decode(raw[name]) if name in raw else None
            if value is not None and not any(_same(value, ok) for ok in accepted):
                raise _not_built(name, accepted)
        fields = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from None
    except msgspec.DecodeError as error:
        raise ApiError(
            400, f"the body must be a JSON object: {error}", code="bad_json"
        ) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="bad_json") from None
    if fields.stream_options is not None and not fields.stream:
        raise bad_field("stream_options", "is allowed only with stream: true")
    return fields


def bad_field(name: str, problem: str, code: str = "bad_field") -> ApiError:
    return ApiError(400, f"{name}: {problem}", param=name, code=code)


def check_model(fields: CommonFields, card: ModelCard) -> None:
    """An absent model means the one that is served."""
    if fields.model is not None and fields.model != card.name:
        raise ApiError(
            404,
            f"the model {_short(fields.model)} is not served here; {card.name!r} is",
            param="model",
            code="model_not_found",
        )


def stop_texts(fields: CommonFields) -> list[str]:
    stop = fields.stop
    return [stop] if isinstance(stop, str) else stop or []


def stop_ids(fields: CommonFields, card: ModelCard) -> list[int]:
    ids = fields.stop_token_ids or []
    check_token_ids("stop_token_ids", ids, card)
    return ids


def check_token_ids(name: str, ids: list[int], card: ModelCard) -> None:
    for token_id in ids:
        if not 0 <= token_id < card.vocab_size:
            raise bad_field(
                name,
                f"token id {token_id} is not in the vocabulary, whose ids are 0 to "
                f"{card.vocab_size - 1}",
                code="bad_token_id",
            )


def sampling_of(fields: CommonFields) -> Sampling:
    """How to sample; the seed travels beside it."""
    temperature = TEMPERATURE_DEFAULT if fields.temperature is None else fields.temperature
    top_k = max(fields.top_k or 0, 0)
    top_p = 1.0 if fields.top_p is None else fields.top_p
    if top_p == 0:  # Nothing but the most likely token.
        top_k, top_p = 1, 1.0
    return Sampling(temperature, top_k, top_p, fields.min_p or 0.0)


def _same(value: object, accepted: object) -> bool:
    # True is 1 for Python, but not for somebody who writes JSON.
    return isinstance(value, bool) == isinstance(accepted, bool) and value == accepted


def _not_built(name: str, accepted: tuple[object, ...]) -> ApiError:
    values = " or ".join(msgspec.json.encode(value).decode() for value in accepted)
    only = f"only {values} or no value" if values else "only no value"
    return bad_field(name, f"is not supported yet; {only} is accepted", code="not_supported")


def _wrong_field(error: msgspec.ValidationError) -> ApiError:
    """Msgspec says where: "Expected `int`, got `str` - at `$.max_tokens`"."""
    problem, _, path = str(error).rpartition(" - at ")
    match = re.fullmatch(r"`\$\.(.+)`", path)
    if match is None:
        return ApiError(400, f"the body is wrong: {error}", code="bad_json")
    return bad_field(match.group(1), problem)


def _short(text: str) -> str:
    """Text for an error message, cut where it gets long."""
    return repr(text if len(text) <= 100 else text[:100] + "…")
