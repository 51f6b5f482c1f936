"""One connection to the scheduler, whose frames are sorted to the requests that wait for them.

1. `opening.open_connection` makes it, once the scheduler has answered the handshake.
2. Requests are submitted and cancelled without waiting; `run` sorts what comes to them.
3. The connection is lost when its other side goes away, when nothing came for `silence_ms_max`
   although something is due (a request is open, or a question is), or when a frame cannot be
   read. Then every open request fails with `ServerLost`, and so does whatever is asked later.
   It is not opened again: a new scheduler knows nothing of the requests of the old one.
4. At the end, the requests that are still open are cancelled.
"""

import itertools
from contextlib import suppress
from typing import TypeVar, assert_never

import msgspec
import trio

from tidegate.clients.errors import (
    ClientError,
    RequestFailed,
    RequestRefused,
    ServerLost,
)
from tidegate.clients.question import Question
from tidegate.clients.silence import Silence
from tidegate.clients.token_queue import TokenQueue
from tidegate.clients.unsent import Unsent
from tidegate.ipc.peer_link import PeerLink
from tidegate.ipc.protocol import (
    Accepted,
    Cancel,
    Card,
    ClientToScheduler,
    EndReason,
    Finished,
    GetCard,
    GetStatus,
    Malformed,
    ModelCard,
    NewTokens,
    Ping,
    Refused,
    RequestId,
    Status,
    StreamId,
    Submit,
    Waiting,
    WaitKind,
    WhyWaiting,
    decode_for_client,
    encode,
    unpack_ids,
)

OPEN_REQUEST_COUNT_MAX = 8192
SILENCE_MS_MAX = 10_000
LAST_FRAMES_MS = 50  # Frames that came before a disconnect are read for so long after it.

COMPLETE = (EndReason.END_TOKEN, EndReason.STOP_ID, EndReason.STOP_TEXT, EndReason.LENGTH)

Answer = TypeVar("Answer")


class OpenRequest:
    """A request that was submitted. It stays open until `queue.is_over`."""

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.queue = TokenQueue()
        self.why = Question[Waiting]()


class Connection:
    """Made by `opening.open_connection`. Its methods are called by tasks of one trio run.

    Calls raise `ServerLost` once the connection is lost.
    """

    def __init__(self, link: PeerLink, silence_ms_max: int) -> None:
        self._link = link
        self._unsent = Unsent(link)
        self._silence = Silence(silence_ms_max / 1000)
        self._trio = trio.lowlevel.current_trio_token()
        self._numbers = itertools.count(1)
        self._requests: dict[RequestId, OpenRequest] = {}
        self._streams: dict[StreamId, OpenRequest] = {}
        self._card = Question[ModelCard | None]()
        self._status = Question[Status]()
        self._loss: ServerLost | None = None
        self._lost = trio.Event()

    # --- Requests ---

    def submit(self, submit: Submit) -> OpenRequest:
        """Send a request under a name of its own. Raises `RequestRefused`, `ServerLost`."""
        if self._loss is not None:
            raise self._loss
        request_id = RequestId(str(next(self._numbers)))
        is_full = len(self._requests) >= OPEN_REQUEST_COUNT_MAX
        if is_full or not self._unsent.has_room(len(submit.prompt)):
            text = "too many requests are open on this connection"
            raise RequestRefused(Refused(request_id, 429, "too_many_requests", text))
        request = OpenRequest(request_id)
        self._requests[request_id] = request
        self._silence.expect()
        self._send(msgspec.structs.replace(submit, request_id=request_id))
        return request

    def cancel(self, request: OpenRequest, kept: int, reason: EndReason) -> None:
        """End a request here and now, and tell the scheduler. Nothing if it is over."""
        if request.queue.is_over:
            return
        text = "the request was cancelled"
        request.queue.fail(RequestFailed(text, 499, reason.value, reason=reason))
        self._forget(request)
        self._send(Cancel(request.request_id, kept, reason))

    def cancel_soon(self, request: OpenRequest, kept: int) -> None:
        """`cancel` from any thread, even while garbage is collected."""
        with suppress(trio.RunFinishedError):  # The connection ended with the run.
            self._trio.run_sync_soon(self.cancel, request, kept, EndReason.CANCELLED)

    def fail_all(self, error: ClientError) -> None:
        """End every open request with this error, and cancel it."""
        for request in tuple(self._requests.values()):
            request.queue.fail(error)
            self._forget(request)
            self._send(Cancel(request.request_id, 0, EndReason.CANCELLED))

    @property
    def open_request_count(self) -> int:
        return len(self._requests)

    # --- Questions ---

    async def ask_card(self) -> ModelCard | None:
        """The served model's card; None while no worker has joined."""
        return await self._ask(self._card, GetCard(""))

    async def ask_status(self) -> Status:
        return await self._ask(self._status, GetStatus())

    async def why_waiting(self, request: OpenRequest) -> Waiting:
        """What a request waits for, under its name in logs once it is accepted."""
        if self._loss is not None:
            raise self._loss
        if request.queue.is_over:
            return over(request)
        return await self._ask(request.why, WhyWaiting(request.request_id))

    async def _ask(self, question: Question[Answer], message: ClientToScheduler) -> Answer:
        if self._loss is not None:
            raise self._loss
        if not question.is_open:
            question.open()
            self._silence.expect()
            self._send(message)
        return await question.wait()

    # --- Frames ---

    async def run(self) -> None:
        """Read and write frames until the connection is lost. It never raises."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._unsent.run)
            nursery.start_soon(self._read)
            nursery.start_soon(self._watch_silence)
            nursery.start_soon(self._watch_disconnect)
            await self._lost.wait()
            nursery.cancel_scope.cancel()

    async def wait_lost(self) -> ServerLost:
        """Return when the connection is lost, with the reason."""
        await self._lost.wait()
        assert self._loss is not None
        return self._loss

    def lose(self, reason: str) -> None:
        """End everything: nothing more can come from the scheduler."""
        if self._loss is not None:
            return
        self._loss = ServerLost(f"the scheduler at {self._link.endpoint} is lost: {reason}")
        for request in self._requests.values():
            request.queue.fail(self._loss)
            request.why.fail(self._loss)
        self._requests.clear()
        self._streams.clear()
        self._card.fail(self._loss)
        self._status.fail(self._loss)
        self._lost.set()

    def _send(self, message: ClientToScheduler) -> None:
        self._unsent.send(encode(message))

    async def _read(self) -> None:
        while True:
            frames = await self._link.receive()
            self._silence.heard()
            for frame in frames:
                try:
                    self._take(frame)
                except ValueError as error:  # Of msgspec, and of lists of ids.
                    self.lose(f"it sent what cannot be read: {error}")
                    return
            self._rest()

    def _take(self, frame: bytes) -> None:
        message = decode_for_client(frame)
        match message:
            case NewTokens():
                self._new_tokens(message)
            case Accepted():
                request = self._requests.get(message.request_id)
                if request is not None:
                    self._streams[message.stream] = request
                    request.queue.accept(message)
            case Refused():
                request = self._requests.get(message.request_id)
                if request is not None:
                    request.queue.fail(RequestRefused(message))
                    self._forget(request)
            case Finished():
                request = self._streams.get(message.stream)
                if request is not None:
                    self._forget(request)
                    if message.reason in COMPLETE:
                        request.queue.finish(message)
                    else:
                        request.queue.fail(RequestFailed.from_finished(message))
            case Waiting():
                request = self._requests.get(message.request_id)
                if request is not None:
                    name = name_in_logs(request)
                    request.why.give(msgspec.structs.replace(message, request_id=name))
            case Card():
                self._card.give(message.card)
            case Status():
                self._status.give(message)
            case Ping():
                pass
            case Malformed():
                self._malformed(message.text)
            case _:
                assert_never(message)

    def _new_tokens(self, message: NewTokens) -> None:
        streams, counts = unpack_ids(message.streams), unpack_ids(message.counts)
        first_indexes = unpack_ids(message.first_indexes)
        tokens = unpack_ids(message.tokens)
        if not len(streams) == len(counts) == len(first_indexes) or sum(counts) != len(tokens):
            raise ValueError("the lists of a tokens message do not fit together")
        begin = 0
        for stream, first_index, count in zip(streams, first_indexes, counts, strict=True):
            ids = tokens[begin : begin + count]
            begin += count
            request = self._streams.get(StreamId(stream))
            if request is None:
                continue  # It was cancelled here meanwhile.
            try:
                request.queue.add(first_index, ids)
            except RequestFailed as error:
                request.queue.fail(error)
                self._forget(request)
                self._send(Cancel(request.request_id, first_index, EndReason.ERROR))

    def _malformed(self, text: str) -> None:
        """One of our frames could not be read: one that nobody has answered yet."""
        error = RequestFailed(f"the scheduler cannot read what was sent: {text}", 400)
        for request in tuple(self._requests.values()):
            request.why.fail(error)
            if request.queue.accepted is None:
                request.queue.fail(error)
                self._forget(request)
        self._card.fail(error)
        self._status.fail(error)

    def _forget(self, request: OpenRequest) -> None:
        self._requests.pop(request.request_id, None)
        if request.queue.accepted is not None:
            self._streams.pop(request.queue.accepted.stream, None)
        request.why.give(over(request))
        self._rest()

    # --- Silence and loss ---

    def _rest(self) -> None:
        if not self._requests and not self._card.is_open and not self._status.is_open:
            self._silence.rest()

    async def _watch_silence(self) -> None:
        await self._silence.wait()
        self.lose(f"nothing came from it for {self._silence.seconds_max:g} s")

    async def _watch_disconnect(self) -> None:
        await self._link.wait_disconnected()
        await trio.sleep(LAST_FRAMES_MS / 1000)
        self.lose("the connection ended")


def name_in_logs(request: OpenRequest) -> RequestId:
    """The scheduler's name of a request, or its own until it is accepted."""
    accepted = request.queue.accepted
    return request.request_id if accepted is None else RequestId(accepted.internal_id)


def over(request: OpenRequest) -> Waiting:
    return Waiting(name_in_logs(request), None, WaitKind.NOTHING, "the request is over")
