"""Tokens of one request between the connection, which adds them, and the one who reads them.

1. `accept` or `refuse` is called once. A reader waits for it with `wait_accepted`.
2. `add` is called with numbered tokens, in order; the reader takes all that are there.
3. `finish` or `fail` is called once. The reader gets the rest, then the end or the error.

The bound is the request's own max_tokens: never more than that many ids wait, four bytes each.
"""

from array import array
from collections.abc import Sequence

import trio

from tidegate.clients.errors import ClientError, RequestFailed
from tidegate.ipc.protocol import Accepted, Finished


class TokenQueue:
    """One writer and one reader, both tasks of the same trio run."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.received_count = 0
        self._error: ClientError | None = None
        self._ids = array("I")
        self._changed = trio.Event()

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self.finished is not None or self._error is not None

    # --- The connection's side ---

    def accept(self, accepted: Accepted) -> None:
        self.accepted = accepted
        self._notify()

    def add(self, first_index: int, ids: Sequence[int]) -> None:
        """Take in tokens of which the first has this output index. Repeated ones are dropped.

        Raises `RequestFailed` if tokens are missing before them, or there are more of them than
        were asked for.
        """
        assert self.accepted is not None
        if first_index > self.received_count:
            raise RequestFailed(
                f"tokens {self.received_count} to {first_index - 1} were lost on the way"
            )
        new = ids[self.received_count - first_index :]
        if self.received_count + len(new) > self.accepted.max_tokens:
            raise RequestFailed(f"more than {self.accepted.max_tokens} tokens came")
        self.received_count += len(new)
        self._ids.extend(new)
        self._notify()

    def finish(self, finished: Finished) -> None:
        if not self.is_over:
            self.finished = finished
            self._notify()

    def fail(self, error: ClientError) -> None:
        if not self.is_over:
            self._error = error
            self._notify()

    # --- The reader's side ---

    async def wait_accepted(self) -> Accepted:
        """Raises the error with which the request was refused or failed."""
        while self.accepted is None:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self.accepted

    async def wait_tokens(self) -> None:
        """Return when `take` gives tokens or nothing more will come."""
        while not self._ids and not self.is_over:
            await self._changed.wait()

    def take(self) -> "array[int]":
        """The ids that are there. Once a failed request's ids are taken, raises its error."""
        if not self._ids and self._error is not None:
            raise self._error
        taken, self._ids = self._ids, array("I")
        return taken

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
