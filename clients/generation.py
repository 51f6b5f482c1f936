"""One request of the client library, as its user sees it.

1. Made by `generate`; nothing is sent yet.
2. `start`, entering `async with`, or the first token asked for: the prompt is encoded and
   submitted, and the scheduler accepts or refuses it.
3. Tokens are read, one by one by iterating, or all that are there with `read`.
4. It ends: `result` is set; or an error is raised.
5. Or it is left early: leaving `async with`, `close`, or dropping the last reference to it
   cancels the request, in whatever phase it is.
"""

from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import trio

from tidegate.clients.connection import Connection, OpenRequest
from tidegate.clients.errors import RequestFailed
from tidegate.clients.result import Result
from tidegate.clients.text import TextPiece, TextStream
from tidegate.ipc.protocol import (
    Accepted,
    EndReason,
    Finished,
    RequestId,
    Submit,
    Usage,
    Waiting,
    WaitKind,
)

NO_TEXT = TextPiece("", False, 0)


class Token(msgspec.Struct, frozen=True):
    """One token. `text` is what it made certain, often more or less than its own letters.

    Joined, the texts of all tokens are the text of the answer.
    """

    id: int
    text: str
    index: int


class Prepared(NamedTuple):
    """A request ready to be sent. `text` is None if no text is wanted."""

    submit: Submit
    text: TextStream | None


class Generation:
    """A request that yields `Token`s. See the module's text for its life.

    Iterating, `start` and `read` raise `RequestRefused`, `RequestFailed`, `ServerLost`,
    `TextUnavailable`, or `ValueError` for arguments that can never be right.
    """

    def __init__(
        self, connection: Connection, prepare: Callable[[], Awaitable[Prepared]]
    ) -> None:
        self._connection = connection
        self._prepare = prepare
        self._request: OpenRequest | None = None
        self._text: TextStream | None = None
        self._prompt_tokens = 0
        self._ids = array("I")
        self._texts: list[str] = []
        self._ready: deque[Token] = deque()
        self._deferred: Token | None = None
        self._closed = False
        self.result: Result | None = None

    # --- Starting and leaving ---

    async def start(self) -> Accepted:
        """Submit the request unless that has been done; what the scheduler answered."""
        if self._request is None:
            if self._closed:
                raise RuntimeError("this generation was closed before it began")
            prepared = await self._prepare()
            self._text = prepared.text
            self._prompt_tokens = len(prepared.submit.prompt) // 4
            self._request = self._connection.submit(prepared.submit)
        try:
            return await self._request.queue.wait_accepted()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the request unless it is over. May be called at any time, more than once."""
        self._closed = True
        if self._request is not None:
            self._connection.cancel(self._request, len(self._ids), EndReason.CANCELLED)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Garbage is collected in any thread, at any moment: only leave a note.
        if self._request is not None and not self._request.queue.is_over:
            self._connection.cancel_soon(self._request, len(self._ids))

    async def why_waiting(self) -> Waiting:
        """What the request waits for now, as the scheduler sees it.

        It may be asked at any time, and by another task than the one that reads. Before the
        request was sent and after its end it waits for nothing, and the text says so. Raises
        `ServerLost`, or `RequestFailed` if the scheduler is too old to know the question.
        """
        if self._request is None:
            text = "the request has not been sent"
            return Waiting(RequestId(""), None, WaitKind.NOTHING, text)
        return await self._connection.why_waiting(self._request)

    # --- Reading ---

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        if not self._ready:
            self._ready.extend(await self.read())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def read(self) -> list[Token]:
        """All tokens that are there, waiting for at least one; none at the end.

        Do not mix it with iterating. A cancelled call has taken nothing.
        """
        await trio.lowlevel.checkpoint()
        if self.result is not None:
            return []
        await self.start()
        assert self._request is not None
        while True:
            await self._request.queue.wait_tokens()
            tokens = self._take(self._request)
            if tokens or self.result is not None:
                return tokens

    def _take(self, request: OpenRequest) -> list[Token]:
        """The tokens that the queue holds. Sets `result` when they are the last."""
        queue, text = request.queue, self._text
        try:
            ids = queue.take()
        except RequestFailed as failure:
            tokens = self._flush()
            if not tokens:
                partial = self._result(
                    "", failure.reason, len(self._ids), failure.cached_tokens
                )
                raise failure.after(partial) from None
            return tokens
        tokens = [] if self._deferred is None else [self._deferred]
        self._deferred = None
        for token_id in ids:
            piece = NO_TEXT if text is None else text.push([token_id])
            tokens.append(Token(token_id, piece.text, len(self._ids)))
            self._ids.append(token_id)
            if piece.stopped:
                self._connection.cancel(request, piece.kept, EndReason.STOP_TEXT)
                self._end(tokens, EndReason.STOP_TEXT, piece.kept)
                return tokens
        if queue.finished is not None:
            self._finish(tokens, queue.finished)
        elif tokens and text is not None and text.is_waiting:
            # Should no other token follow, the text that is kept back is this one's.
            self._deferred = tokens.pop()
        self._texts.extend(token.text for token in tokens)
        return tokens

    def _finish(self, tokens: list[Token], finished: Finished) -> None:
        """The stream has ended of itself: add the rest of its text to the last token."""
        last = NO_TEXT if self._text is None else self._text.finish()
        if last.text:
            text = tokens[-1].text + last.text
            tokens[-1] = msgspec.structs.replace(tokens[-1], text=text)
        reason = EndReason.STOP_TEXT if last.stopped else finished.reason
        kept = last.kept if last.stopped else len(self._ids)
        self._end(tokens, reason, kept, finished.usage.cached_tokens)

    def _flush(self) -> list[Token]:
        """The token that was kept back, if any, with the rest of its text: no other follows."""
        token, self._deferred = self._deferred, None
        if token is None:
            return []
        rest = NO_TEXT if self._text is None else self._text.finish()
        token = msgspec.structs.replace(token, text=token.text + rest.text)
        self._texts.append(token.text)
        return [token]

    def _end(
        self, tokens: list[Token], reason: EndReason, kept: int, cached_tokens: int = 0
    ) -> None:
        text = "".join(token.text for token in tokens)
        self.result = self._result(text, reason, kept, cached_tokens)

    def _result(self, text: str, reason: EndReason, kept: int, cached_tokens: int) -> Result:
        """What has come, with `text` behind what was read before."""
        assert self._request is not None
        accepted = self._request.queue.accepted
        assert accepted is not None
        return Result(
            text="".join([*self._texts, text]),
            token_ids=tuple(self._ids[:kept]),
            reason=reason,
            usage=Usage(self._prompt_tokens, cached_tokens, kept),
            request_id=RequestId(accepted.internal_id),
            seed=accepted.seed,
            max_tokens=accepted.max_tokens,
        )
