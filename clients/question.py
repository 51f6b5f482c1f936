"""A question to the scheduler that at most once is on its way; whoever asks meanwhile joins."""

from typing import Generic, TypeVar

import trio

from tidegate.clients.errors import ClientError

Answer = TypeVar("Answer")


class Question(Generic[Answer]):
    """Opened when it is sent, and closed by its answer or by a failure."""

    def __init__(self) -> None:
        self._round: _Round[Answer] | None = None

    @property
    def is_open(self) -> bool:
        return self._round is not None

    def open(self) -> None:
        assert self._round is None
        self._round = _Round()

    def give(self, answer: Answer) -> None:
        """The answer is there. Nothing happens if nobody has asked."""
        closed, self._round = self._round, None
        if closed is not None:
            closed.answers.append(answer)
            closed.ended.set()

    def fail(self, error: ClientError) -> None:
        closed, self._round = self._round, None
        if closed is not None:
            closed.error = error
            closed.ended.set()

    async def wait(self) -> Answer:
        """The answer to the question that is open now."""
        assert self._round is not None
        mine = self._round
        await mine.ended.wait()
        if mine.error is not None:
            raise mine.error
        return mine.answers[0]


class _Round(Generic[Answer]):
    """From one sending of the question to its answer."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.answers: list[Answer] = []
        self.error: ClientError | None = None
