"""The ZeroMQ client library for trio."""

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import trio

from tidegate.clients.connection import SILENCE_MS_MAX, Connection
from tidegate.clients.endpoint_default import default_endpoint
from tidegate.clients.errors import (
    ClientError,
    ConnectFailed,
    ServerLost,
    TextUnavailable,
)
from tidegate.clients.generation import Generation, Prepared
from tidegate.clients.opening import CONNECT_MS_MAX, open_connection
from tidegate.clients.options import Filled, Options
from tidegate.clients.result import Result
from tidegate.ipc.endpoints import EndpointError
from tidegate.ipc.protocol import ModelCard, Status

if TYPE_CHECKING:
    from tidegate.clients.tokeniser import Tokeniser


class AsyncClient:
    """A connection to the scheduler, for use in `async with`.

    `endpoint` is the one that the server prints; None means `default_endpoint()`. Entering
    raises `ConnectFailed` when no scheduler answers within `connect_ms_max`. A scheduler that
    is silent for `silence_ms_max` while something is due from it is taken for lost: then, as
    when the connection breaks, everything raises `ServerLost`. A lost client stays lost.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect_ms_max: int = CONNECT_MS_MAX,
        silence_ms_max: int = SILENCE_MS_MAX,
    ) -> None:
        self._endpoint = endpoint
        self._connect_ms_max = connect_ms_max
        self._silence_ms_max = silence_ms_max
        self._connection: Connection | None = None
        self._tokeniser: Tokeniser | None = None
        self._tokeniser_turn = trio.Lock()

    async def __aenter__(self) -> Self:
        try:
            endpoint = self._endpoint or default_endpoint()
        except EndpointError as error:
            raise ConnectFailed(str(error)) from None
        self._opening = open_connection(endpoint, self._connect_ms_max, self._silence_ms_max)
        self._connection = await self._opening.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._opening.__aexit__(kind, error, traceback)

    # --- Requests ---

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Generation:
        """An answer to iterate over, best inside `async with`: see `Generation`.

        The prompt is text or token ids, which are used as they are. Nothing is sent before the
        first token is asked for.
        """
        return Generation(self._open(), partial(self._prepare, prompt, Filled(**options)))

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Result:
        """The whole answer at once. Raises what iterating over `generate` raises."""
        async with self.generate(prompt, **options) as generation:
            while await generation.read():
                pass
            assert generation.result is not None
            return generation.result

    async def _prepare(self, prompt: str | Sequence[int], options: Filled) -> Prepared:
        stops = options.stops()
        if isinstance(prompt, str):
            prompt = await (await self.tokeniser()).encode_async(prompt)
        text = None
        if options.detokenise:
            text = (await self.tokeniser()).text_stream(stops, options.stop_token_ids)
        return Prepared(options.submit(prompt), text)

    # --- The server ---

    async def card(self) -> ModelCard | None:
        """The served model's card; None while no worker has joined."""
        return await self._open().ask_card()

    async def status(self) -> Status:
        """Whether a token can flow, and how full the pools are."""
        return await self._open().ask_status()

    async def tokeniser(self) -> "Tokeniser":
        """The served model's tokenizer, fetched once for this connection.

        Raises `TextUnavailable` while no worker has joined, or without `tokenizers`.
        """
        async with self._tokeniser_turn:
            if self._tokeniser is None:
                try:
                    from tidegate.clients.tokeniser import Tokeniser
                except ImportError as error:
                    raise TextUnavailable(
                        f"text needs the package {error.name}: pip install 'tidegate[proxy]'"
                    ) from None
                card = await self.card()
                if card is None:
                    raise TextUnavailable("no worker has joined the scheduler yet")
                self._tokeniser = await trio.to_thread.run_sync(Tokeniser, card)
            return self._tokeniser

    async def wait_lost(self) -> ServerLost:
        """Return when the scheduler is lost, with the reason."""
        return await self._open().wait_lost()

    def fail_all(self, error: ClientError) -> None:
        """End every open generation of this client with `error`, and cancel it."""
        self._open().fail_all(error)

    def _open(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("use the client inside `async with`")
        return self._connection
