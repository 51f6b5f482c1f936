"""Every message that crosses a process boundary, and nothing else.

Encoding is MessagePack; a message is an array that begins with its tag. There is one union
for each direction and one decoder for each union, which checks the tag and every field's
type, so code behind the edge can trust the values. Token ids and page ids travel as
little-endian uint32 bytes (`pack_ids`, `unpack_ids`): two thousand of them cost nothing.

**Pages are the grant.** A row may feed every position that its pages cover in every group,
up to its limit; a prompt's positions only as `Chunk` says. It stops itself at an end token,
a stop id or its limit. So a worker runs ahead without asking.
"""

import struct
from collections.abc import Iterable
from enum import Enum
from typing import NewType

import msgspec

from tidegate.kvcache.layout import Layout

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 64 * 1024 * 1024

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
PoolId = NewType("PoolId", str)
Row = NewType("Row", int)
Ticket = NewType("Ticket", int)
PlanSeq = NewType("PlanSeq", int)
StreamId = NewType("StreamId", int)
Incarnation = NewType("Incarnation", int)


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all wire messages. The tag is the class name."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the parts of messages, which need no tag."""


class Role(Enum):
    """What is placed on a worker by preference; every worker can run prefill chunks."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class EndReason(Enum):
    """Why a request ended."""

    END_TOKEN = "end_token"  # The model's end token, which is the last token delivered.
    STOP_ID = "stop_id"  # One of the request's stop ids, which is the last token delivered.
    STOP_TEXT = "stop_text"  # The client found a stop string and sent `Cancel`.
    LENGTH = "length"  # max_tokens were sampled.
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"  # A deadline passed; the text says which.
    ERROR = "error"  # The text says what went wrong.


class Phase(Enum):
    """Where a request is in its life. docs/STATES.md tells what begins and ends each."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"
    FINISHED = "finished"


class WaitKind(Enum):
    """What a request waits for."""

    TURN = "turn"  # Others are served before it.
    ROW = "row"  # A row of a worker, all of which are taken.
    PAGES = "pages"  # Pages of a pool, which other requests hold.
    DRAINING = "draining"  # Pages of a pool that are on their way: a worker has yet to answer.
    DESTINATION = "destination"  # So many finished prompts need a decode worker before it.
    ANSWER = "answer"  # What a worker computes or copies for it.
    READER = "reader"  # Its client, which has not read what was sent.
    NOTHING = "nothing"  # It is over, or was never sent, or is unknown here.


# --- Parts ---


class Sampling(Part, frozen=True):
    """How a row samples. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 are off.

    The result is a function of the logits, `seed` and the token's output index alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


class PageRun(Part, frozen=True):
    """Consecutive pages of one group; the first of them begins at `first_position`."""

    first_position: int
    ids: bytes


class PullGroup(Part, frozen=True):
    """One group of a pull: `source_ids[i]` is copied to `target_ids[i]`, both equally many."""

    first_position: int
    source_ids: bytes
    target_ids: bytes


class ModelCard(Part, frozen=True):
    """What a client needs to turn text into tokens and back, and nothing of the weights."""

    name: str
    family: str
    vocab_size: int
    context: int  # Positions that a request may cover.
    tokenizer_json: bytes
    chat_template: str | None
    bos_id: int | None
    add_bos: bool
    eos_ids: tuple[int, ...]


class Fingerprint(Part, frozen=True):
    """What two workers must share so that pages of one mean the same to the other."""

    model: str  # Hash of the configuration and the tokenizer.
    dtype: str
    layout: Layout  # With page sizes, and the flag in force.


class PoolHandle(Part, frozen=True):
    """How another process reaches a pool's bytes: which transport, and its address there.

    For shared memory the address is `PID:FD` of a memfd, to be mapped read-only.
    """

    transport: str
    address: str
    byte_count: int
    page_counts: tuple[int, ...]  # For each group, in the layout's order.


class FetchResult(Part, frozen=True):
    """The end of one pull. `error` is empty when every page was copied."""

    ticket: Ticket
    error: str
    byte_count: int
    busy_us: int


class RowEnd(Part, frozen=True):
    row: Row
    reason: EndReason


class ChunkDone(Part, frozen=True):
    """Positions [0, until) of the row are settled on the device."""

    row: Row
    until: int


class Trimmed(Part, frozen=True):
    """The row has given up the last `page_counts[g]` pages of its table of group g."""

    row: Row
    page_counts: tuple[int, ...]


class Usage(Part, frozen=True):
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class PoolState(Part, frozen=True):
    """One pool of one worker, for people: `/health` and the line that `serve` prints.

    `free_count` has the pages that a request can have at once; `cached_count` of them hold
    prompts that are cached until then.
    """

    worker: WorkerId
    role: Role
    pool: str
    page_tokens: int
    page_bytes: int
    page_count: int
    free_count: int
    cached_count: int


class CacheState(Part, frozen=True):
    """The prefix cache of one worker since it joined. Lookups are prompts that began there."""

    worker: WorkerId
    lookup_count: int
    hit_count: int
    prompt_tokens: int
    hit_tokens: int
    evicted_pages: int


class PageHolder(Part, frozen=True):
    """A request, by its name in logs, and the pages of a pool that it holds or was promised.

    A page of the prefix cache that several requests read counts for each of them.
    """

    request_id: RequestId
    page_count: int


# --- Scheduler to worker ---


class Start(Part, frozen=True, tag=True):
    """Begin a row whose positions [0, position) are settled in its pages.

    `tokens` are those from `position` on: a prompt to prefill, or the tokens sampled
    already and not yet fed. `output_index` counts the tokens sampled before. The row ends
    by itself when position `limit` would be fed next.
    """

    row: Row
    request_id: RequestId
    position: int
    tokens: bytes
    output_index: int
    limit: int
    pages: tuple[PageRun, ...]
    sampling: Sampling
    stop_ids: bytes
    ignore_eos: bool


class Chunk(Part, frozen=True, tag=True):
    """Prefill the row's positions up to `until`; sample after the last one if `sample`.

    A launch runs the waiting chunks of the lowest turn, one of a row.
    """

    row: Row
    until: int
    sample: bool
    turn: int = 0


class Grow(Part, frozen=True, tag=True):
    """Append pages to the row's table of one group."""

    row: Row
    group: int
    ids: bytes


class Limit(Part, frozen=True, tag=True):
    """The row decodes no position from `limit` on, but sits out, until another `Limit` comes.

    It ends at the limit of its `Start` as ever.
    """

    row: Row
    limit: int


class Trim(Part, frozen=True, tag=True):
    """Give up the row's pages that no launch has fed and that hold nothing below `until`.

    It keeps a page for the position that it feeds next. `Report.trimmed` tells what it gave up,
    be it nothing; a row that has ended by itself tells nothing.
    """

    row: Row
    until: int


class Stop(Part, frozen=True, tag=True):
    """Forget the row: it is in no later launch.

    The report that completes this plan may still tell what it sampled before, and no later one
    names it. It is not an error if the row has ended by itself.
    """

    row: Row


class Fetch(Part, frozen=True, tag=True):
    """Copy pages from another worker's pool into this one's, and report the ticket."""

    ticket: Ticket
    request_id: RequestId
    source_pool: PoolId
    source_incarnation: Incarnation
    groups: tuple[PullGroup, ...]
    length: int


class Peer(Part, frozen=True, tag=True):
    """Another worker's pool, which later `Fetch` operations may name."""

    pool: PoolId
    incarnation: Incarnation
    handle: PoolHandle


class PeerGone(Part, frozen=True, tag=True):
    """Unmap this pool: its owner is gone."""

    pool: PoolId
    incarnation: Incarnation


class Poison(Part, frozen=True, tag=True):
    """Overwrite pages that were freed with NaN. Sent only when checking is switched on."""

    group: int
    ids: bytes


Operation = Start | Chunk | Grow | Limit | Trim | Stop | Fetch | Peer | PeerGone | Poison


class Welcome(Message, frozen=True):
    """The worker is part of the fleet; its pools are empty and known under this name."""

    protocol: int
    epoch: str
    pool: PoolId
    incarnation: Incarnation
    row_count: int  # Rows are numbered from 0 to `row_count - 1`.
    report_interval_ms: int  # An idle worker reports at least this often.


class WorkerRefused(Message, frozen=True):
    """The worker may not join, or may no longer take part. It exits with this reason."""

    reason: str


class Plan(Message, frozen=True):
    """Operations to apply in order. Numbers rise by one; the link is first in, first out."""

    seq: PlanSeq
    operations: tuple[Operation, ...]


SchedulerToWorker = Welcome | WorkerRefused | Plan


# --- Worker to scheduler ---


class Hello(Message, frozen=True):
    protocol: int
    worker: WorkerId
    role: Role
    pid: int
    fingerprint: Fingerprint
    card: ModelCard
    handle: PoolHandle
    row_count_max: int


class Report(Message, frozen=True):
    """One launch, several that followed one another quickly, or a sign of life.

    Every launch and pull that was begun before plan `completed` was applied is over.

    `rows`, `counts` are uint32 lists of equal length: row i sampled `counts[i]` tokens, which
    follow one another in `tokens`. `applied` is the newest plan that the last launch knew.
    """

    applied: PlanSeq
    completed: PlanSeq
    launch: int
    rows: bytes
    counts: bytes
    tokens: bytes
    ended: tuple[RowEnd, ...]
    chunks: tuple[ChunkDone, ...]
    fetched: tuple[FetchResult, ...]
    starved: bytes  # Rows that sat out for want of pages.
    busy_us: int
    trimmed: tuple[Trimmed, ...] = ()


class Fault(Message, frozen=True):
    """A row's work failed; the row is forgotten by the worker, the others go on."""

    row: Row
    request_id: RequestId
    kind: str
    text: str


class Goodbye(Message, frozen=True):
    """The worker stops of its own accord."""

    reason: str


WorkerToScheduler = Hello | Report | Fault | Goodbye


# --- Client to scheduler ---


class GetCard(Message, frozen=True):
    """Ask for the model's card. An empty `model` means the one that is served."""

    model: str


class GetStatus(Message, frozen=True):
    """Ask whether a token can flow, and how full the pools are."""


class Submit(Message, frozen=True):
    """Generate up to `max_tokens` tokens (None: as the server's setting says, see `Accepted`).

    `request_id` is unique for its connection; the scheduler's own id is in `Accepted`.
    `timeout_ms` bounds the time until the first token; None leaves the server's setting.
    `total_timeout_ms` bounds the time until the end; tokens that came before are kept.
    Service is shared between tenants; see docs/FAIRNESS.md.
    Prompts share cached pages only where `tenant` and `cache_salt` are the same.
    """

    request_id: RequestId
    model: str
    prompt: bytes
    max_tokens: int | None
    sampling: Sampling
    seed: int | None  # None: the scheduler draws one and tells it in `Accepted`.
    stop_ids: bytes = b""
    ignore_eos: bool = False
    has_stop_text: bool = False
    tenant: str = ""
    priority: int = 0
    timeout_ms: int | None = None
    cache_salt: str = ""
    total_timeout_ms: int | None = None


class Cancel(Message, frozen=True):
    """Stop a request in whatever phase it is; `kept` tokens of it were of use."""

    request_id: RequestId
    kept: int
    reason: EndReason


class WhyWaiting(Message, frozen=True):
    """Ask what a request of this connection waits for; `Waiting` answers, at once."""

    request_id: RequestId


ClientToScheduler = GetCard | GetStatus | Submit | Cancel | WhyWaiting


# --- Scheduler to client ---


class Card(Message, frozen=True):
    """The served model's card, or None while no worker has joined."""

    card: ModelCard | None


class Status(Message, frozen=True):
    """`ready` says that a token can flow: each role that requests need has a live worker."""

    ready: bool
    reason: str  # Why not, when it is not.
    epoch: str
    model: str
    waiting: int
    running: int
    longest_prompt: int  # The longest prompt that the door accepts with one new token.
    default_max_tokens: int  # What an absent max_tokens becomes, room permitting.
    pools: tuple[PoolState, ...]
    caches: tuple[CacheState, ...]  # Of the workers that have one.


class Accepted(Message, frozen=True):
    """The request will run. `stream` names it in the messages that follow."""

    request_id: RequestId
    stream: StreamId
    internal_id: str  # The request's name in logs.
    epoch: str
    seed: int
    max_tokens: int


class Refused(Message, frozen=True):
    """The request does not run. `status` is the HTTP status that fits.

    `pool`, `needed` and `limit` (pages, or tokens for the pool "context") are set when the
    request can never fit; `role` and `worker` say where the limit is.
    """

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


class NewTokens(Message, frozen=True):
    """New tokens of several streams: one frame for a connection and turn.

    Stream i gets `counts[i]` tokens, whose first has output index `first_indexes[i]`.
    """

    streams: bytes
    first_indexes: bytes
    counts: bytes
    tokens: bytes


class Finished(Message, frozen=True):
    """The last message about a stream. `text` is empty unless something went wrong."""

    stream: StreamId
    reason: EndReason
    usage: Usage
    text: str
    status: int  # The HTTP status that fits: 200, or 5xx after an error.


class Waiting(Message, frozen=True):
    """What a request waits for at this moment. `text` says it in a sentence.

    `ahead` counts those that are served before it, and `first` is the first of them. Of pages,
    the request needs `pages_needed` to go on and `pages_available` are there for it; besides,
    `pages_draining` will be free when their worker has answered. `pages_cached` hold cached
    prompts that nobody reads, and are given up when pages are taken: they count as free ones
    do. `holders` are the requests with the most pages of that pool, the largest first, and
    `holders_left_out` counts the others. `passed` counts the requests behind it that have begun
    before it, since they fitted while it waited for pages.
    Names of requests are those in logs, but for `request_id`, which is the client's own.
    """

    request_id: RequestId
    phase: Phase | None  # None with `WaitKind.NOTHING`.
    kind: WaitKind
    text: str
    ahead: int = 0
    first: RequestId | None = None
    role: Role | None = None
    worker: WorkerId | None = None
    pool: str = ""
    pages_short: int = 0
    pages_needed: int = 0
    pages_available: int = 0
    pages_draining: int = 0
    pages_cached: int = 0
    holders: tuple[PageHolder, ...] = ()
    holders_left_out: int = 0
    passed: int = 0


class Ping(Message, frozen=True):
    """The scheduler is alive. Sent about once a second to connections that have requests."""

    epoch: str


class Malformed(Message, frozen=True):
    """The last frame from this connection could not be read; nothing was done."""

    text: str


SchedulerToClient = (
    Card | Status | Accepted | Refused | NewTokens | Finished | Waiting | Ping | Malformed
)


# --- Encoding ---

encode = msgspec.msgpack.Encoder().encode
decode_for_worker = msgspec.msgpack.Decoder(SchedulerToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(WorkerToScheduler).decode
decode_for_client = msgspec.msgpack.Decoder(SchedulerToClient).decode
decode_from_client = msgspec.msgpack.Decoder(ClientToScheduler).decode


class MalformedIds(ValueError):
    """Bytes that are no list of uint32."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Little-endian uint32 bytes. Raises `struct.error` for a value outside of uint32."""
    values = tuple(ids)
    return struct.pack(f"<{len(values)}I", *values)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """The list that `pack_ids` packed. Raises `MalformedIds` unless its length divides by 4."""
    if len(data) % 4:
        raise MalformedIds(f"{len(data)} bytes are not a list of uint32")
    return struct.unpack(f"<{len(data) // 4}I", data)
