"""Answers one request: submits its prompts, and sends what comes, whole or as a stream.

Streamed and whole answers are read from the same generations, so their texts and counts are the
same. A stream begins when the first tokens are there: until then a refusal, a timeout or an
error still has its HTTP status.
"""

import time
from collections.abc import Sequence

import msgspec
import trio

from tidegate.clients.errors import ClientError
from tidegate.clients.generation import Generation
from tidegate.clients.proxy.answers import Answer, Choice, Shape, Usage, usage_of
from tidegate.clients.proxy.exchange import ClientGone, Exchange
from tidegate.clients.proxy.sse import DONE, event_of
from tidegate.clients.result import Result


class Answering:
    """One choice for each generation, in order.

    `stream` says whether the answer comes in chunks, `include_usage` whether the last chunk
    tells the usage.
    """

    def __init__(
        self,
        exchange: Exchange,
        shape: Shape,
        model: str,
        generations: Sequence[Generation],
        *,
        stream: bool,
        include_usage: bool,
    ) -> None:
        self._exchange = exchange
        self._shape = shape
        self._generations = generations
        self._stream = stream
        self._include_usage = include_usage
        self._head = Answer(
            id="",
            object=shape.chunk_object if stream else shape.whole_object,
            created=int(time.time()),
            model=model,
            choices=[],
            usage=None if include_usage else msgspec.UNSET,
        )
        self._failure: ClientError | ClientGone | None = None

    async def run(self) -> None:
        """Raises `ClientError` and `ClientGone`. No generation is left running."""
        self._exchange.when_gone.extend(each.close for each in self._generations)
        try:
            await self._start()
            async with trio.open_nursery() as nursery:
                for index, generation in enumerate(self._generations):
                    nursery.start_soon(self._read, index, generation, nursery.cancel_scope)
            if self._failure is not None:
                raise self._failure
            await self._finish([_result(generation) for generation in self._generations])
        finally:
            for generation in self._generations:
                generation.close()

    async def _start(self) -> None:
        names = [(await generation.start()).internal_id for generation in self._generations]
        self._exchange.note(request_id=names[0], choices=len(names), streamed=self._stream)
        self._exchange.add_header(b"x-tidegate-request", ",".join(names))
        name = f"{self._shape.id_prefix}{self._exchange.http_id}-{names[0]}"
        self._head = msgspec.structs.replace(self._head, id=name)

    async def _read(
        self, index: int, generation: Generation, every_choice: trio.CancelScope
    ) -> None:
        """Read one choice. The first failure ends all of them."""
        try:
            if self._stream:
                await self._send_choice(index, generation)
            else:
                while await generation.read():
                    pass
        except (ClientError, ClientGone) as failure:
            self._failure = self._failure or failure
            every_choice.cancel()

    async def _send_choice(self, index: int, generation: Generation) -> None:
        """While a client reads slowly tokens gather, and go out together in one event."""
        choices = [self._shape.begin(index, "")]
        has_begun = False
        while tokens := await generation.read():
            text = "".join(token.text for token in tokens)
            if not has_begun:
                choices = [self._shape.begin(index, text)]
            elif text:
                choices = [self._shape.go_on(index, text)]
            else:
                choices = []
            has_begun = True
            if generation.result is None and choices:
                await self._exchange.send_events(self._event(choices))
                choices = []
        await self._exchange.send_events(
            b"".join(
                self._event([choice])
                for choice in (*choices, self._shape.end(index, _result(generation).reason))
            )
        )

    async def _finish(self, results: list[Result]) -> None:
        usage = usage_of(results)
        self._exchange.note(
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            reason=results[0].reason.value,
        )
        if self._stream:
            last = self._event([], usage) if self._include_usage else b""
            await self._exchange.end_stream(last + DONE)
            return
        choices = [self._shape.whole(index, result) for index, result in enumerate(results)]
        whole = msgspec.structs.replace(self._head, choices=choices, usage=usage)
        await self._exchange.respond(200, msgspec.json.encode(whole))

    def _event(self, choices: list[Choice], usage: Usage | None = None) -> bytes:
        chunk = msgspec.structs.replace(self._head, choices=choices)
        if usage is not None:
            chunk = msgspec.structs.replace(chunk, usage=usage)
        return event_of(chunk)


def _result(generation: Generation) -> Result:
    assert generation.result is not None
    return generation.result
