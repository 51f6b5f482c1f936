"""What came of a request of the client library."""

import msgspec

from tidegate.ipc.protocol import EndReason, RequestId, Usage


class Result(msgspec.Struct, frozen=True):
    """A complete answer, or what came of a request that failed.

    `text` is empty if the request was made with `detokenise=False`.

    `usage` counts tokens of use: with a stop string, those up to the one that completed it.
    """

    text: str
    token_ids: tuple[int, ...]
    reason: EndReason  # Of a complete one END_TOKEN, STOP_ID, STOP_TEXT or LENGTH.
    usage: Usage
    request_id: RequestId  # The request's name in logs.
    seed: int
    max_tokens: int
