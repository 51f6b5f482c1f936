"""Scripts for the fake scheduler."""

from collections.abc import Sequence

import trio
import trio.lowlevel

from fakes.fake_scheduler import Behaviour, FakeRequest
from tidegate.ipc.protocol import EndReason


def answer(
    *frames: Sequence[int], reason: EndReason = EndReason.LENGTH, gap_s: float = 0.0
) -> Behaviour:
    """Accept, send the tokens frame by frame, and finish."""

    async def behave(request: FakeRequest) -> None:
        request.accept()
        for ids in frames:
            await trio.sleep(gap_s)
            if request.cancels:
                return
            request.tokens(ids)
        request.finish(reason)

    return behave


def answer_and_hang(*frames: Sequence[int]) -> Behaviour:
    """Accept and send tokens, and then nothing more."""

    async def behave(request: FakeRequest) -> None:
        request.accept()
        for ids in frames:
            request.tokens(ids)
        await request.cancelled.wait()

    return behave


async def hang(request: FakeRequest) -> None:
    """Accept, and then nothing."""
    request.accept()
    await request.cancelled.wait()


async def ignore(request: FakeRequest) -> None:
    """Not even accept."""
    await request.cancelled.wait()


def fail(*ids: int, reason: EndReason = EndReason.ERROR, text: str, status: int) -> Behaviour:
    """Accept, send tokens, and end with an error."""

    async def behave(request: FakeRequest) -> None:
        request.accept()
        request.tokens(ids)
        await trio.lowlevel.checkpoint()
        request.finish(reason, text, status)

    return behave
