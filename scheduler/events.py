"""What can happen to the core. Token-blind: lengths, counts and ids only."""

from typing import NewType

import msgspec

from tidegate.ipc.protocol import (
    ChunkDone,
    EndReason,
    FetchResult,
    Incarnation,
    PlanSeq,
    PoolHandle,
    PoolId,
    RequestId,
    Role,
    Row,
    RowEnd,
    Trimmed,
    WorkerId,
)
from tidegate.kvcache.layout import Layout

ClientId = NewType("ClientId", str)


class WorkerJoined(msgspec.Struct, frozen=True):
    """A worker with empty pools. The shell has checked protocol and fingerprint."""

    worker: WorkerId
    role: Role
    pool: PoolId
    incarnation: Incarnation
    layout: Layout
    context: int
    handle: PoolHandle
    row_count: int


class WorkerLost(msgspec.Struct, frozen=True):
    """The worker is gone for good: its process ended, or its incarnation was closed."""

    worker: WorkerId
    reason: str


class Reported(msgspec.Struct, frozen=True):
    """A worker's report without its tokens, which the shell keeps under `report`.

    `rows` and `counts` are uint32 as on the wire, equally many; the rows are the worker's, and
    differ.
    """

    worker: WorkerId
    report: int
    applied: PlanSeq
    completed: PlanSeq
    rows: bytes = b""
    counts: bytes = b""
    ended: tuple[RowEnd, ...] = ()
    chunks: tuple[ChunkDone, ...] = ()
    fetched: tuple[FetchResult, ...] = ()
    starved: bytes = b""
    busy_us: int = 0  # How long the launch took; 0 if it is not known.
    trimmed: tuple[Trimmed, ...] = ()


class RowFaulted(msgspec.Struct, frozen=True):
    """The worker could not go on with a row, and has forgotten it."""

    worker: WorkerId
    row: Row
    request_id: RequestId
    kind: str
    text: str


class Submitted(msgspec.Struct, frozen=True):
    """A well-formed request, its tokens within the vocabulary. The id is the shell's own.

    `unit_hashes` has one for each full unit of the prompt; see `kvcache.unit_hashes`.
    """

    request_id: RequestId
    client: ClientId
    prompt_tokens: int
    max_tokens: int | None
    priority: int = 0
    timeout_ms: int | None = None
    unit_hashes: tuple[bytes, ...] = ()
    tenant: str = ""
    total_timeout_ms: int | None = None
    has_stop_text: bool = False


class Cancelled(msgspec.Struct, frozen=True):
    request_id: RequestId
    kept: int
    reason: EndReason


class ReaderChanged(msgspec.Struct, frozen=True):
    """The client does not keep up with reading what is sent to it, or has caught up."""

    client: ClientId
    is_behind: bool


class ClientGone(msgspec.Struct, frozen=True):
    """Nobody reads this client's streams any more; all its requests are cancelled."""

    client: ClientId
    reason: str


Event = (
    WorkerJoined
    | WorkerLost
    | Reported
    | RowFaulted
    | Submitted
    | Cancelled
    | ReaderChanged
    | ClientGone
)
