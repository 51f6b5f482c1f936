"""Errors as OpenAI's API gives them: a JSON object, and the HTTP status that fits."""

import math

import msgspec

from tidegate.clients.errors import (
    ClientError,
    RequestFailed,
    RequestRefused,
    ServerLost,
    TextUnavailable,
)
from tidegate.clients.result import Result

RETRY_AFTER_MS = 1000  # What a client is told to wait when nobody knows better.


class PartialUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ErrorFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """The `error` object. The fields from `pool` on are ours: where a limit was met, and what
    came of a request that failed after that."""

    message: str
    type: str
    param: str | None
    code: str | None
    pool: str = ""
    needed: int = 0
    limit: int = 0
    role: str = ""
    worker: str = ""
    usage: PartialUsage | None = None
    partial_text: str | None = None  # Not of a stream, which has sent it.


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorFields


class ApiError(Exception):
    """Ends a request with an error response, or with an error event if it was streaming."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_ms: int = 0,
        refused: RequestRefused | None = None,
        partial: Result | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_ms = retry_after_ms
        self.fields = ErrorFields(
            message=message,
            type=error_type(status),
            param=param,
            code=code,
            pool=refused.pool if refused else "",
            needed=refused.needed if refused else 0,
            limit=refused.limit if refused else 0,
            role=refused.role if refused else "",
            worker=refused.worker if refused else "",
            usage=_usage_of(partial) if partial else None,
            partial_text=partial.text if partial else None,
        )

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.fields))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """For those who may try again `Retry-After`, in whole seconds, and in milliseconds
        as OpenAI's clients read it."""
        if self.status not in (429, 503):
            return []
        wait_ms = self.retry_after_ms or RETRY_AFTER_MS
        seconds = math.ceil(wait_ms / 1000)
        return [
            (b"retry-after", str(seconds).encode()),
            (b"retry-after-ms", str(wait_ms).encode()),
        ]


def _usage_of(partial: Result) -> PartialUsage:
    prompt, output = partial.usage.prompt_tokens, partial.usage.output_tokens
    return PartialUsage(prompt, output, prompt + output)


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def from_client_error(error: ClientError) -> ApiError:
    """What the client library could not do, for the HTTP client."""
    match error:
        case RequestRefused():
            return ApiError(
                error.status,
                error.text,
                code=error.code,
                retry_after_ms=error.retry_after_ms,
                refused=error,
            )
        case RequestFailed():
            return ApiError(error.status, error.text, code=error.code, partial=error.partial)
        case ServerLost():
            # Its text names the endpoint, which is of no use to an HTTP client.
            return ApiError(503, "the server has lost its scheduler", code="server_lost")
        case TextUnavailable():
            return ApiError(503, str(error), code="not_ready")
        case _:
            return ApiError(500, str(error), code="internal_error")
