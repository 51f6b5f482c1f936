"""The trio shell: frames and time become events, and commands become frames and log lines.

It decides nothing. One turn takes all that has arrived, applies it to the core, asks for one
plan, and carries it out; sends never wait. What a send finds out (a peer that is gone, or reads
too slowly) becomes an event of the next turn.
"""

import random
from collections.abc import Callable
from typing import assert_never

import msgspec
import numpy as np
import trio

from tidegate.ipc.log import Log
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    Accepted,
    Cancel,
    Card,
    EndReason,
    Finished,
    GetCard,
    GetStatus,
    Malformed,
    Ping,
    Plan,
    Refused,
    RequestId,
    SchedulerToClient,
    SchedulerToWorker,
    Start,
    Submit,
    Usage,
    WhyWaiting,
    WorkerId,
    decode_from_client,
    encode,
)
from tidegate.scheduler.client_desk import answer_why
from tidegate.scheduler.commands import (
    AcceptRequest,
    Command,
    EmitTokens,
    FenceWorker,
    FinishRequest,
    Record,
    RefuseRequest,
    SendPlan,
    StartRow,
)
from tidegate.scheduler.core import Core
from tidegate.scheduler.events import Cancelled, ClientGone, Event, ReaderChanged
from tidegate.scheduler.intake import Intake, client_id
from tidegate.scheduler.link import Link, SendOutcome
from tidegate.scheduler.outgoing import Outgoing
from tidegate.scheduler.status import status_of
from tidegate.scheduler.streams import TOKEN_BYTES, Stream, Streams
from tidegate.scheduler.worker_desk import Turn, WorkerDesk

# Beyond what ZeroMQ keeps for it: a client for whom so many frames wait does not keep up.
BEHIND_FRAME_COUNT = 64
BEHIND_INTERVAL_S = 0.02  # How often it is looked at whether it has caught up.


class ShellSettings(msgspec.Struct, frozen=True):
    """Times are in seconds, but for the names that say otherwise."""

    beat_s: float = 1.0  # How often clients are told that the scheduler lives.
    report_interval_ms: int = 1000
    worker_silence_s_max: float = 120.0


class Shell:
    """Runs one core over two links, until cancelled."""

    def __init__(
        self,
        core: Core,
        workers: Link,
        clients: Link,
        log: Log,
        settings: ShellSettings,
        epoch: str,
        seeds: random.Random,
        cache_secret: bytes,
        on_fence: Callable[[WorkerId, int], None] | None = None,
    ) -> None:
        """For `epoch`, `seeds` and `cache_secret` see `Intake`.

        `on_fence` is called with each worker that is closed for want of progress, and the
        number of its process, which may live on.
        """
        self._core = core
        self._workers = workers
        self._clients = clients
        self._log = log
        self._settings = settings
        self._epoch = epoch
        self._on_fence = on_fence
        self._desk = WorkerDesk(epoch, settings.report_interval_ms, log)
        self._streams = Streams()
        self._intake = Intake(core, self._desk, self._streams, log, epoch, seeds, cache_secret)
        self._outgoing = Outgoing()
        self._worker_frames: list[tuple[bytes, bytes]] = []
        self._client_frames: list[tuple[bytes, bytes]] = []
        self._late: list[Event] = []  # Found out while commands were carried out.
        self._reports: list[Turn] = []  # Those of the turn, with their tokens.
        self._questions: list[tuple[bytes, RequestId]] = []  # The turn's `WhyWaiting`.
        self._behind: dict[bytes, None] = {}  # Connections that do not keep up with reading.
        self._wake = trio.Event()
        self._turned = trio.Event()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive, self._workers, self._worker_frames)
            nursery.start_soon(self._receive, self._clients, self._client_frames)
            nursery.start_soon(self._beat)
            while True:
                await self._sleep()
                self._wake = trio.Event()
                self._turn(now_us())
                self._turned.set()
                self._turned = trio.Event()

    def end_streams(self, text: str) -> None:
        """Tell every client that its requests end now. For an orderly stop."""
        for stream in self._streams:
            usage = Usage(
                len(stream.prompt) // TOKEN_BYTES, 0, len(stream.output) // TOKEN_BYTES
            )
            ended = Finished(stream.stream_id, EndReason.ERROR, usage, text, 503)
            self._clients.send(stream.peer, encode(ended))

    # --- Waiting ---

    async def _receive(self, link: Link, frames: list[tuple[bytes, bytes]]) -> None:
        """Frames are bounded: the next are taken when a turn has used these."""
        while True:
            frames.extend(await link.receive())
            turned = self._turned
            self._wake.set()
            await turned.wait()

    async def _sleep(self) -> None:
        wake_us = self._core.wake_us
        deadline = float("inf") if wake_us is None else wake_us / 1e6
        if self._behind:
            deadline = min(deadline, trio.current_time() + BEHIND_INTERVAL_S)
        with trio.move_on_at(deadline):
            await self._wake.wait()
        # Frames that came at the same moment join this turn.
        await trio.lowlevel.checkpoint()

    async def _beat(self) -> None:
        while True:
            await trio.sleep(self._settings.beat_s)
            ping = encode(Ping(self._epoch))
            for peer in self._streams.peers():
                self._note_outcome(peer, self._clients.send(peer, ping))
            limit_us = now_us() - round(self._settings.worker_silence_s_max * 1e6)
            for worker in self._desk.silent_since(limit_us):
                self._fence(worker, "it was silent for too long")
            if self._late:
                self._wake.set()

    # --- One turn ---

    def _turn(self, now: int) -> None:
        late, self._late = self._late, []
        for event in late:
            self._core.apply(event, now)
        for peer in self._workers.take_gone():
            self._carry(self._desk.lose_peer(peer, "its connection ended"), now)
        for peer in self._clients.take_gone():
            self._core.apply(ClientGone(client_id(peer), "its connection ended"), now)
        self._reports = []
        for peer, frame in self._worker_frames:
            turn = self._desk.take(peer, frame, len(self._reports), now)
            self._reports.append(turn)
            self._carry(turn, now)
        self._worker_frames.clear()
        for peer, frame in self._client_frames:
            self._client_frame(peer, frame, now)
        self._client_frames.clear()
        for command in self._core.plan(now):
            self._execute(command)
        for peer, answer in answer_why(self._core, self._streams, self._questions):
            self._outgoing.add(peer, answer)
        self._questions.clear()
        self._flush_outgoing()
        self._note_caught_up()
        if self._late:
            self._wake.set()

    def _carry(self, turn: Turn, now: int) -> None:
        for reply in turn.replies:
            self._workers.send(reply.peer, encode(reply.message))
        for event in turn.events:
            self._core.apply(event, now)

    def _client_frame(self, peer: bytes, frame: bytes, now: int) -> None:
        try:
            message = decode_from_client(frame)
        except msgspec.DecodeError as error:
            self._log.rate_limited(LogEvent.MALFORMED_FRAME, link="clients", text=str(error))
            self._reply(peer, Malformed(str(error)))
            return
        match message:
            case GetCard():
                self._reply(peer, Card(self._desk.card))
            case GetStatus():
                self._reply(peer, status_of(self._core, self._desk.card, self._epoch))
            case Submit():
                refused = self._intake.submit(peer, message, now)
                if refused is not None:
                    self._reply(peer, refused)
            case Cancel():
                stream = self._streams.of_client(peer, message.request_id)
                if stream is not None:
                    kept = max(0, message.kept)
                    cancelled = Cancelled(stream.request_id, kept, message.reason)
                    self._core.apply(cancelled, now)
            case WhyWaiting():
                self._questions.append((peer, message.request_id))
            case _:
                assert_never(message)

    # --- Commands ---

    def _execute(self, command: Command) -> None:
        match command:
            case SendPlan():
                self._send_plan(command)
            case FenceWorker():
                self._fence(command.worker, command.reason)
            case AcceptRequest():
                stream = self._streams.get(command.request_id)
                accepted = Accepted(
                    stream.client_request_id,
                    stream.stream_id,
                    stream.request_id,
                    self._epoch,
                    stream.sampling.seed,
                    command.max_tokens,
                )
                self._outgoing.add(stream.peer, accepted)
            case RefuseRequest():
                stream = self._streams.remove(command.request_id)
                self._outgoing.add(stream.peer, refused_message(stream, command))
            case EmitTokens():
                self._deliver(command)
            case FinishRequest():
                stream = self._streams.remove(command.request_id)
                finished = Finished(
                    stream.stream_id,
                    command.reason,
                    command.usage,
                    command.text,
                    command.status,
                )
                self._outgoing.add(stream.peer, finished)
            case Record():
                self._log.info(command.event, request_id=command.request_id, **command.fields)
            case _:
                assert_never(command)

    def _deliver(self, command: EmitTokens) -> None:
        report = self._reports[command.report]
        rows, sampled = report.rows, report.sampled
        assert rows is not None and sampled is not None
        first_indexes = np.frombuffer(command.first_indexes, "<u4")
        if command.left_out:
            kept = np.ones(len(first_indexes), np.bool_)
            kept[list(command.left_out)] = False
            sampled, first_indexes = sampled.only(kept), first_indexes[kept]
        for delivery in rows.deliver(sampled, first_indexes):
            self._outgoing.deliver(delivery)

    def _start(self, worker: WorkerId, row: StartRow) -> Start:
        stream = self._streams.get(row.request_id)
        start = stream.start(row)
        self._desk.rows(worker).begin(row.row, stream)
        return start

    def _send_plan(self, command: SendPlan) -> None:
        operations = tuple(
            self._start(command.worker, operation)
            if isinstance(operation, StartRow)
            else operation
            for operation in command.operations
        )
        plan: SchedulerToWorker = Plan(command.seq, operations)
        outcome = self._workers.send(self._desk.peer(command.worker), encode(plan))
        if outcome is SendOutcome.GONE:
            self._lose_worker(command.worker, "its connection ended")
        elif outcome is SendOutcome.FULL:
            self._lose_worker(command.worker, "it does not read its plans")

    def _fence(self, worker: WorkerId, reason: str) -> None:
        """Close the worker for good, and have its process killed by whoever started it."""
        member = self._desk.member(worker)
        if member is not None:
            if self._on_fence is not None:
                self._on_fence(worker, member.hello.pid)
            self._lose_worker(worker, reason)

    def _lose_worker(self, worker: WorkerId, reason: str) -> None:
        turn = self._desk.lose(worker, reason)
        for reply in turn.replies:
            self._workers.send(reply.peer, encode(reply.message))
        self._late.extend(turn.events)

    def _flush_outgoing(self) -> None:
        for peer, messages in self._outgoing.take():
            for message in messages:
                self._reply(peer, message)

    def _note_caught_up(self) -> None:
        for peer in tuple(self._behind):
            if not self._clients.waiting_count(peer):
                del self._behind[peer]
                self._late.append(ReaderChanged(client_id(peer), is_behind=False))

    def _reply(self, peer: bytes, message: SchedulerToClient) -> None:
        self._note_outcome(peer, self._clients.send(peer, encode(message)))

    def _note_outcome(self, peer: bytes, outcome: SendOutcome) -> None:
        match outcome:
            case SendOutcome.SENT:
                waiting_count = self._clients.waiting_count(peer)
                if waiting_count >= BEHIND_FRAME_COUNT and peer not in self._behind:
                    self._behind[peer] = None
                    self._late.append(ReaderChanged(client_id(peer), is_behind=True))
            case SendOutcome.GONE:
                self._late.append(ClientGone(client_id(peer), "its connection ended"))
            case SendOutcome.FULL:
                self._log.rate_limited(LogEvent.CLIENT_TOO_SLOW, client=client_id(peer))
                self._late.append(ClientGone(client_id(peer), "it reads too slowly"))
            case _:
                assert_never(outcome)


def refused_message(stream: Stream, command: RefuseRequest) -> Refused:
    return Refused(
        stream.client_request_id,
        command.status,
        command.code,
        command.text,
        command.pool,
        command.needed,
        command.limit,
        command.role,
        command.worker,
        command.retry_after_ms,
    )


def now_us() -> int:
    return round(trio.current_time() * 1e6)
