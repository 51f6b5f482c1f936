"""What the core asks the shell to do. The core itself does no I/O."""

from collections.abc import Mapping
from typing import assert_never

import msgspec

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    Chunk,
    EndReason,
    Fetch,
    Grow,
    Limit,
    PageRun,
    Peer,
    PeerGone,
    PlanSeq,
    Poison,
    RequestId,
    Row,
    Stop,
    Trim,
    Usage,
    WorkerId,
)

FieldValue = str | int | float | bool | Mapping[str, int] | None


class StartRow(msgspec.Struct, frozen=True):
    """A `Start` without its tokens and sampling, which the shell keeps and joins to it."""

    row: Row
    request_id: RequestId
    position: int
    output_index: int
    limit: int
    pages: tuple[PageRun, ...]


PlanOperation = StartRow | Chunk | Grow | Limit | Trim | Stop | Fetch | Peer | PeerGone | Poison


def is_of_row(operation: PlanOperation, row: Row) -> bool:
    """Is it part of a row's life, from its start to all but its stop?"""
    match operation:
        case StartRow() | Chunk() | Grow() | Limit() | Trim():
            return operation.row == row
        case Stop() | Fetch() | Peer() | PeerGone() | Poison():
            return False
        case _:
            assert_never(operation)


class SendPlan(msgspec.Struct, frozen=True):
    worker: WorkerId
    seq: PlanSeq
    operations: tuple[PlanOperation, ...]


class FenceWorker(msgspec.Struct, frozen=True):
    """Close the worker for good, and have its process killed if that can be done.

    The core has forgotten it already.
    """

    worker: WorkerId
    reason: str


class AcceptRequest(msgspec.Struct, frozen=True):
    request_id: RequestId
    max_tokens: int


class RefuseRequest(msgspec.Struct, frozen=True):
    """The request enters no queue. The fields are those of the wire's `Refused`."""

    request_id: RequestId
    status: int
    code: str
    text: str
    pool: str = ""
    needed: int = 0
    limit: int = 0
    role: str = ""
    worker: str = ""
    retry_after_ms: int = 0


class EmitTokens(msgspec.Struct, frozen=True):
    """Deliver the tokens of the report `report` to the requests that feed on its rows.

    `first_indexes` has the output index of the first token of each of its rows, as uint32.
    Nothing is delivered of those rows whose index in the report is in `left_out`.
    """

    report: int
    first_indexes: bytes
    left_out: tuple[int, ...] = ()


class FinishRequest(msgspec.Struct, frozen=True):
    """The last command about a request that was accepted."""

    request_id: RequestId
    reason: EndReason
    usage: Usage
    text: str
    status: int


class Record(msgspec.Struct, frozen=True):
    """A decision, for the log. Fields hold no text of a request."""

    event: LogEvent
    request_id: RequestId | None
    fields: dict[str, FieldValue]


Command = (
    SendPlan | FenceWorker | AcceptRequest | RefuseRequest | EmitTokens | FinishRequest | Record
)
