"""A scheduler of the real protocol over a real socket, whose answers a test writes.

    async with open_fake_scheduler(path, card) as scheduler:
        scheduler.behaviour = my_behaviour  # An async function of one `FakeRequest`.

Without a behaviour of its own it repeats the tokens of `answer`, as many as are asked for.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio

from tidegate.ipc.endpoints import ipc_endpoint
from tidegate.ipc.link import ServerLink
from tidegate.ipc.protocol import (
    Accepted,
    Cancel,
    Card,
    EndReason,
    Finished,
    GetCard,
    GetStatus,
    Malformed,
    ModelCard,
    NewTokens,
    Phase,
    Ping,
    PoolState,
    Refused,
    RequestId,
    Role,
    SchedulerToClient,
    Status,
    StreamId,
    Submit,
    Usage,
    Waiting,
    WaitKind,
    WhyWaiting,
    WorkerId,
    decode_from_client,
    encode,
    pack_ids,
    unpack_ids,
)
from tidegate.ipc.zmq_context import open_context

EPOCH = "e1"
DEFAULT_MAX_TOKENS = 16
PING_S = 0.1


class FakeRequest:
    """One submitted request, as a behaviour sees it."""

    def __init__(
        self, scheduler: "FakeScheduler", peer: bytes, submit: Submit, stream: StreamId
    ) -> None:
        self.submit = submit
        self.stream = stream
        self.prompt = unpack_ids(submit.prompt)
        self.max_tokens = submit.max_tokens or DEFAULT_MAX_TOKENS
        self.sent_count = 0
        self.cancels: list[Cancel] = []
        self.cancelled = trio.Event()
        self.is_over = False
        self._scheduler = scheduler
        self.peer = peer

    def send(self, message: SchedulerToClient) -> None:
        self._scheduler.send(self.peer, message)

    def accept(self) -> None:
        internal_id = RequestId(f"{EPOCH}-{self.stream}")
        request_id, seed = self.submit.request_id, self.submit.seed
        self.send(
            Accepted(request_id, self.stream, internal_id, EPOCH, seed or 7, self.max_tokens)
        )

    def refuse(self, status: int, code: str, text: str, **where: object) -> None:
        self.is_over = True
        self.send(Refused(self.submit.request_id, status, code, text, **where))  # type: ignore[arg-type]

    def tokens(self, ids: Sequence[int], first_index: int | None = None) -> None:
        """Numbered as they should be, unless `first_index` says otherwise."""
        first = self.sent_count if first_index is None else first_index
        self.sent_count = first + len(ids)
        stream, index, count = (pack_ids([value]) for value in (self.stream, first, len(ids)))
        self.send(NewTokens(stream, index, count, pack_ids(ids)))

    def finish(self, reason: EndReason, text: str = "", status: int = 200) -> None:
        self.is_over = True
        usage = Usage(len(self.prompt), 0, self.sent_count)
        self.send(Finished(self.stream, reason, usage, text, status))


Behaviour = Callable[[FakeRequest], Awaitable[None]]


class FakeScheduler:
    """What came is kept in `requests` and `unknown_cancels`."""

    def __init__(self, link: ServerLink, card: ModelCard | None) -> None:
        self.endpoint = link.address
        self.card = card
        self.behaviour: Behaviour = self._repeat
        self.answer: Sequence[int] = ()
        self.ready_reason = ""
        self.pings = True
        self.answers_questions = True
        self.reads = trio.Event()  # Replace it by one that is not set, and nothing is read.
        self.reads.set()
        self.requests: list[FakeRequest] = []
        self.unknown_cancels: list[Cancel] = []
        self.question_count = 0
        self.why = Waiting(RequestId(""), Phase.WAITING, WaitKind.TURN, "it is next")
        self._link = link
        self._peers: set[bytes] = set()
        self._is_closed = False

    @property
    def open_count(self) -> int:
        """Requests that are neither finished nor cancelled."""
        return sum(not r.is_over and not r.cancels for r in self.requests)

    def send(self, peer: bytes, message: SchedulerToClient) -> None:
        self._send_frame(peer, encode(message))

    def _send_frame(self, peer: bytes, frame: bytes) -> None:
        if not self._is_closed:
            self._link.send(peer, frame)

    def send_raw(self, frame: bytes) -> None:
        """A frame to every peer that ever wrote."""
        for peer in sorted(self._peers):
            self._send_frame(peer, frame)

    def close(self) -> None:
        """End all connections, as a scheduler that dies."""
        self._is_closed = True
        self._link.close()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._link.run)
            nursery.start_soon(self._ping)
            while True:
                await self.reads.wait()
                try:
                    frames = await self._link.receive()
                except trio.ClosedResourceError:
                    nursery.cancel_scope.cancel()
                    return
                for peer, frame in frames:
                    self._peers.add(peer)
                    self._take(peer, frame, nursery)

    def _take(self, peer: bytes, frame: bytes, nursery: trio.Nursery) -> None:
        try:
            message = decode_from_client(frame)
        except ValueError as error:
            self.send(peer, Malformed(str(error)))
            return
        match message:
            case GetCard() | GetStatus():
                self.question_count += 1
                if self.answers_questions:
                    is_card = isinstance(message, GetCard)
                    self.send(peer, Card(self.card) if is_card else self.status())
            case Submit():
                request = FakeRequest(self, peer, message, StreamId(len(self.requests) + 1))
                self.requests.append(request)
                nursery.start_soon(self.behaviour, request)
            case Cancel():
                self._cancel(peer, message)
            case WhyWaiting(request_id=name):
                self.question_count += 1
                if self.answers_questions:
                    self.send(peer, msgspec.structs.replace(self.why, request_id=name))

    def _cancel(self, peer: bytes, cancel: Cancel) -> None:
        for request in self.requests:
            is_named = (request.peer, request.submit.request_id) == (peer, cancel.request_id)
            if is_named and not request.is_over:
                request.cancels.append(cancel)
                request.cancelled.set()
                return
        self.unknown_cancels.append(cancel)

    def status(self) -> Status:
        pool = PoolState(WorkerId("w1"), Role.BOTH, "full", 16, 1024, 64, 60, 4)
        model = "" if self.card is None else self.card.name
        running = self.open_count
        is_ready = not self.ready_reason
        return Status(
            is_ready, self.ready_reason, EPOCH, model, 0, running, 255, 16, (pool,), ()
        )

    async def _ping(self) -> None:
        while True:
            await trio.sleep(PING_S)
            if self.pings and self.open_count:
                self.send_raw(encode(Ping(EPOCH)))

    async def _repeat(self, request: FakeRequest) -> None:
        request.accept()
        for index in range(request.max_tokens):
            await trio.lowlevel.checkpoint()
            if request.cancels:
                return
            request.tokens([self.answer[index % len(self.answer)]])
        request.finish(EndReason.LENGTH)


@asynccontextmanager
async def open_fake_scheduler(
    folder: Path, card: ModelCard | None
) -> AsyncGenerator[FakeScheduler]:
    """A running scheduler, whose socket is in `folder`."""
    with open_context() as context:
        async with ServerLink(context, ipc_endpoint(folder, "clients.sock")) as link:
            scheduler = FakeScheduler(link, card)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scheduler.run)
                yield scheduler
                nursery.cancel_scope.cancel()
