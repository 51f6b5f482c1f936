"""The shell's side of worker links: who may join, and frames turned into events.

A worker's life here:

1. `Hello` is checked (protocol, fingerprint against the fleet's) and answered by `Welcome` or
   `WorkerRefused`. A repeated `Hello` of a live worker gets the same `Welcome` again.
2. A new process under the name of a live worker replaces it: the old one is lost first.
3. A worker that is lost is closed for good. If it speaks again it is refused, and must come
   back as a new process with empty pools.
"""

import msgspec
import numpy as np

from tidegate.ipc.log import Log
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    PROTOCOL_VERSION,
    Fault,
    Fingerprint,
    Goodbye,
    Hello,
    Incarnation,
    ModelCard,
    PoolId,
    Report,
    Welcome,
    WorkerId,
    WorkerRefused,
    decode_from_worker,
)
from tidegate.kvcache.layout import Layout, LayoutError
from tidegate.scheduler.events import (
    Event,
    Reported,
    RowFaulted,
    WorkerJoined,
    WorkerLost,
)
from tidegate.scheduler.row_streams import RowStreams, Sampled
from tidegate.scheduler.streams import TOKEN_BYTES


class Member(msgspec.Struct):
    """A worker that has joined."""

    worker: WorkerId
    peer: bytes
    hello: Hello
    welcome: Welcome
    heard_us: int
    rows: RowStreams


class Reply(msgspec.Struct, frozen=True):
    """A message for one worker process."""

    peer: bytes
    message: Welcome | WorkerRefused


class Turn(msgspec.Struct):
    """What a worker's frame comes to: events for the core, and replies."""

    events: list[Event] = msgspec.field(default_factory=list[Event])
    replies: list[Reply] = msgspec.field(default_factory=list[Reply])
    sampled: Sampled | None = None  # The tokens of the frame's report, if it has any,
    rows: RowStreams | None = None  # and what the rows feed that they are of.


class WorkerDesk:
    """Knows which process is which worker. Opens no socket."""

    def __init__(self, epoch: str, report_interval_ms: int, log: Log) -> None:
        self._epoch = epoch
        self._report_interval_ms = report_interval_ms
        self._log = log
        self._by_peer: dict[bytes, Member] = {}
        self._by_name: dict[WorkerId, Member] = {}
        self._incarnation = 0

    @property
    def card(self) -> ModelCard | None:
        """The card of the model that the fleet serves; None while no worker has joined."""
        return next((member.hello.card for member in self._by_name.values()), None)

    @property
    def layout(self) -> Layout | None:
        """The KV layout that all workers share; None while none has joined."""
        members = self._by_name.values()
        return next((member.hello.fingerprint.layout for member in members), None)

    def peer(self, worker: WorkerId) -> bytes:
        return self._by_name[worker].peer

    def rows(self, worker: WorkerId) -> RowStreams:
        return self._by_name[worker].rows

    def member(self, worker: WorkerId) -> Member | None:
        return self._by_name.get(worker)

    def take(self, peer: bytes, frame: bytes, report: int, now_us: int) -> Turn:
        """Read one frame. `report` is the name under which its tokens will be kept."""
        try:
            message = decode_from_worker(frame)
        except msgspec.DecodeError as error:
            return self._malformed(peer, str(error))
        member = self._by_peer.get(peer)
        if isinstance(message, Hello):
            return self._hello(peer, message, now_us)
        if member is None:
            text = "this process is not part of the fleet: start it again"
            return Turn(replies=[Reply(peer, WorkerRefused(text))])
        member.heard_us = now_us
        match message:
            case Report():
                return self._report(member, message, report)
            case Fault():
                fault = RowFaulted(
                    member.worker, message.row, message.request_id, message.kind, message.text
                )
                return Turn(events=[fault])
            case Goodbye():
                return self.lose(member.worker, f"it stopped: {message.reason}")

    def lose(self, worker: WorkerId, reason: str) -> Turn:
        """Close a worker for good: it is refused if it speaks again."""
        member = self._by_name.pop(worker, None)
        if member is None:
            return Turn()
        del self._by_peer[member.peer]
        self._log.warning(LogEvent.WORKER_GONE, worker=worker, reason=reason)
        refused = Reply(member.peer, WorkerRefused(f"closed: {reason}"))
        return Turn(events=[WorkerLost(worker, reason)], replies=[refused])

    def lose_peer(self, peer: bytes, reason: str) -> Turn:
        member = self._by_peer.get(peer)
        return Turn() if member is None else self.lose(member.worker, reason)

    def silent_since(self, limit_us: int) -> list[WorkerId]:
        """Workers not heard of since `limit_us`."""
        return [m.worker for m in self._by_name.values() if m.heard_us < limit_us]

    def _hello(self, peer: bytes, hello: Hello, now_us: int) -> Turn:
        known = self._by_name.get(hello.worker)
        if known is not None and known.peer == peer:
            known.heard_us = now_us
            return Turn(replies=[Reply(peer, known.welcome)])
        reason = self._objection(hello)
        if reason is not None:
            self._log.warning(LogEvent.WORKER_REFUSED, worker=hello.worker, reason=reason)
            return Turn(replies=[Reply(peer, WorkerRefused(reason))])
        turn = Turn()
        if known is not None:
            turn = self.lose(hello.worker, "a new process took its name")
        self._incarnation += 1
        incarnation = Incarnation(self._incarnation)
        pool = PoolId(f"{hello.worker}/{incarnation}")
        welcome = Welcome(
            PROTOCOL_VERSION,
            self._epoch,
            pool,
            incarnation,
            hello.row_count_max,
            self._report_interval_ms,
        )
        rows = RowStreams(hello.row_count_max)
        member = Member(hello.worker, peer, hello, welcome, now_us, rows)
        self._by_peer[peer] = member
        self._by_name[hello.worker] = member
        layout = hello.fingerprint.layout
        turn.replies.append(Reply(peer, welcome))
        turn.events.append(
            WorkerJoined(
                hello.worker,
                hello.role,
                pool,
                incarnation,
                layout,
                hello.card.context,
                hello.handle,
                hello.row_count_max,
            )
        )
        self._log.info(
            LogEvent.WORKER_JOINED,
            worker=hello.worker,
            role=hello.role.value,
            worker_pid=hello.pid,
            pool=pool,
            model=hello.card.name,
            rows=hello.row_count_max,
            swa_only_transfer=layout.swa_only_transfer,
            **{
                f"pages_{group.name}": count
                for group, count in zip(layout.groups, hello.handle.page_counts, strict=True)
            },
        )
        return turn

    def _objection(self, hello: Hello) -> str | None:
        """Why this worker may not join; both values are named where two differ."""
        if hello.protocol != PROTOCOL_VERSION:
            return f"it speaks protocol {hello.protocol}, the scheduler {PROTOCOL_VERSION}"
        if not hello.worker:
            return "it has no name"
        layout = hello.fingerprint.layout
        try:
            layout.check()
        except LayoutError as error:
            return str(error)
        counts = hello.handle.page_counts
        if len(counts) != len(layout.groups) or min(counts, default=0) < 1:
            return f"it has pools of {counts} pages for {len(layout.groups)} groups"
        if hello.row_count_max < 1:
            return "it has no rows"
        others = [m for m in self._by_name.values() if m.worker != hello.worker]
        if not others:
            return None
        return _difference(hello.fingerprint, others[0].hello.fingerprint, others[0].worker)

    def _report(self, member: Member, report: Report, number: int) -> Turn:
        sampled: Sampled | None = None
        if report.rows or report.counts or report.tokens:
            lengths = len(report.rows), len(report.counts), len(report.tokens)
            if any(length % TOKEN_BYTES for length in lengths):
                text = "rows, counts and tokens are not lists of uint32"
                return self._malformed(member.peer, text)
            sampled = Sampled(
                np.frombuffer(report.rows, "<u4"),
                np.frombuffer(report.counts, "<u4"),
                np.frombuffer(report.tokens, "<u4"),
            )
            fault = sampled.fault(member.welcome.row_count)
            if fault is not None:
                return self._malformed(member.peer, fault)
        reported = Reported(
            member.worker,
            number,
            report.applied,
            report.completed,
            report.rows,
            report.counts,
            report.ended,
            report.chunks,
            report.fetched,
            report.starved,
            report.busy_us,
            report.trimmed,
        )
        return Turn(events=[reported], sampled=sampled, rows=member.rows)

    def _malformed(self, peer: bytes, text: str) -> Turn:
        """A frame that cannot be read: a member is lost by it, a stranger is told so."""
        self._log.rate_limited(LogEvent.MALFORMED_FRAME, link="workers", text=text)
        turn = self.lose_peer(peer, f"it sent a malformed frame: {text}")
        if not turn.events:
            turn.replies.append(Reply(peer, WorkerRefused(f"malformed frame: {text}")))
        return turn


def _difference(mine: Fingerprint, theirs: Fingerprint, other: WorkerId) -> str | None:
    """What of two fingerprints differs, in words; None if they agree."""
    if mine == theirs:
        return None
    if mine.model != theirs.model:
        return f"it serves model {mine.model}, worker {other} serves {theirs.model}"
    if mine.dtype != theirs.dtype:
        return f"its dtype is {mine.dtype}, that of worker {other} is {theirs.dtype}"
    if mine.layout.swa_only_transfer != theirs.layout.swa_only_transfer:
        return (
            f"its swa_only_transfer is {mine.layout.swa_only_transfer}, that of worker {other} "
            f"is {theirs.layout.swa_only_transfer}"
        )
    for group, their_group in zip(mine.layout.groups, theirs.layout.groups, strict=False):
        if group.page_tokens != their_group.page_tokens:
            return (
                f"its pages of group {group.name} hold {group.page_tokens} tokens, those of "
                f"worker {other} {their_group.page_tokens}"
            )
        if group.reach != their_group.reach:
            return (
                f"its group {group.name} reaches {group.reach}, that of worker {other} "
                f"{their_group.reach}"
            )
    return f"its KV layout differs from that of worker {other}"
