"""The blocking client: the same library for programs without trio.

A thread of its own runs trio and an `AsyncClient`; calls wait for it.
"""

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple, Unpack

import trio

from tidegate.clients.async_client import AsyncClient
from tidegate.clients.connection import SILENCE_MS_MAX
from tidegate.clients.errors import ServerLost
from tidegate.clients.generation import Generation, Token
from tidegate.clients.opening import CONNECT_MS_MAX
from tidegate.clients.options import Options
from tidegate.clients.result import Result
from tidegate.ipc.protocol import ModelCard, Status, Waiting

CLOSE_MS_MAX = 5_000  # For the thread to end.

Returned = TypeVar("Returned")
Arguments = TypeVarTuple("Arguments")


class _Run:
    """The thread's trio run, once it is up."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.stop = trio.Event()
        self.token = trio.lowlevel.current_trio_token()

    def call(
        self, function: Callable[[*Arguments], Awaitable[Returned]], *arguments: *Arguments
    ) -> Returned:
        """Call an async function in the run, from another thread."""
        try:
            return trio.from_thread.run(function, *arguments, trio_token=self.token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise ServerLost("this client was closed") from None

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function in the run, without waiting for it."""
        with suppress(trio.RunFinishedError):  # Everything was closed with the run.
            self.token.run_sync_soon(function)


class Client:
    """A connection to the scheduler, for use in `with`. Arguments as of `AsyncClient`.

    It may be used by several threads.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect_ms_max: int = CONNECT_MS_MAX,
        silence_ms_max: int = SILENCE_MS_MAX,
    ) -> None:
        self._client = AsyncClient(
            endpoint, connect_ms_max=connect_ms_max, silence_ms_max=silence_ms_max
        )
        self._started: Future[_Run] = Future()
        # A daemon, so that a program which forgets to close the client can still end.
        self._thread = threading.Thread(
            target=self._run_thread, name="tidegate-client", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run = self._open()
        run.call_soon(run.stop.set)
        self._thread.join(CLOSE_MS_MAX / 1000)

    def _run_thread(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            # Once it is up, a failure reaches users as `ServerLost`.
            if not self._started.done():
                self._started.set_exception(error)

    async def _main(self) -> None:
        async with self._client as client:
            run = _Run(client)
            self._started.set_result(run)
            await run.stop.wait()

    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> "BlockingGeneration":
        """An answer to iterate over: see `AsyncClient.generate`."""
        run = self._open()
        return BlockingGeneration(run, run.client.generate(prompt, **options))

    def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Result:
        """The whole answer at once."""
        with self.generate(prompt, **options) as generation:
            while generation.read():
                pass
            assert generation.result is not None
            return generation.result

    def card(self) -> ModelCard | None:
        """The served model's card; None while no worker has joined."""
        run = self._open()
        return run.call(run.client.card)

    def status(self) -> Status:
        """Whether a token can flow, and how full the pools are."""
        run = self._open()
        return run.call(run.client.status)

    def _open(self) -> _Run:
        if not self._started.done():
            raise RuntimeError("use the client inside `with`")
        return self._started.result()


class BlockingGeneration:
    """A request that yields `Token`s: see `generation.Generation`.

    Leaving `with`, `close`, and dropping it (a `break` out of `for`) cancel the request.
    """

    def __init__(self, run: _Run, generation: Generation) -> None:
        self._run = run
        self._generation = generation
        self._ready: deque[Token] = deque()

    @property
    def result(self) -> Result | None:
        """The complete answer, once iterating has come to its end."""
        return self._generation.result

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        if not self._ready:
            self._ready.extend(self.read())
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def read(self) -> list[Token]:
        """All tokens that are there, waiting for at least one; none at the end."""
        return self._run.call(self._generation.read)

    def why_waiting(self) -> Waiting:
        """What the request waits for now: see `Generation.why_waiting`. For any thread."""
        return self._run.call(self._generation.why_waiting)

    def close(self) -> None:
        """Cancel the request unless it is over."""
        self._run.call_soon(self._generation.close)

    def __enter__(self) -> Self:
        self._run.call(self._generation.start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
