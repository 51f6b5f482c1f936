"""What can go wrong for a user of the client library, as types."""

from tidegate.clients.result import Result
from tidegate.ipc.protocol import EndReason, Finished, Refused


class ClientError(Exception):
    """Base of all errors of the client library, apart from `ValueError` for bad arguments."""


class RequestRefused(ClientError):
    """The scheduler does not run the request; nothing was computed.

    `status` is the HTTP status that fits. `pool`, `needed` and `limit` (pages, or tokens for
    the pool "context") are set when the request can never fit; `role` and `worker` say where.
    """

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.text)
        self.status = refused.status
        self.code = refused.code
        self.text = refused.text
        self.pool = refused.pool
        self.needed = refused.needed
        self.limit = refused.limit
        self.role = refused.role
        self.worker = refused.worker
        self.retry_after_ms = refused.retry_after_ms


class RequestFailed(ClientError):
    """The request was accepted and ended without being complete. `status` as for HTTP.

    `partial` has what came of it before, with `reason` TIMEOUT, CANCELLED or ERROR; None if the
    request was not even accepted.
    """

    def __init__(
        self,
        text: str,
        status: int = 500,
        code: str = "request_failed",
        *,
        reason: EndReason = EndReason.ERROR,
        cached_tokens: int = 0,
        partial: Result | None = None,
    ) -> None:
        super().__init__(text)
        self.text = text
        self.status = status
        self.code = code
        self.reason = reason
        self.cached_tokens = cached_tokens
        self.partial = partial

    @classmethod
    def from_finished(cls, finished: Finished) -> "RequestFailed":
        text = finished.text or f"the request ended: {finished.reason.value}"
        return cls(
            text,
            max(finished.status, 500),
            finished.reason.value,
            reason=finished.reason,
            cached_tokens=finished.usage.cached_tokens,
        )

    def after(self, partial: Result) -> "RequestFailed":
        """The same failure, of a request of which this much had come."""
        return RequestFailed(
            self.text,
            self.status,
            self.code,
            reason=self.reason,
            cached_tokens=self.cached_tokens,
            partial=partial,
        )


class ServerLost(ClientError):
    """The scheduler is gone, or was silent for too long. The client cannot be used any more."""


class ConnectFailed(ServerLost):
    """No scheduler answered at the endpoint in time."""


class TextUnavailable(ClientError):
    """Text cannot be turned into tokens or back: no card yet, or a package is missing."""
