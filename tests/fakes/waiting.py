"""Waiting for something that no event tells of."""

from collections.abc import Callable

import trio

POLL_S = 0.002


async def until(holds: Callable[[], bool], seconds_max: float = 5) -> None:
    """Return when it holds. Raises `trio.TooSlowError` if that takes too long."""
    with trio.fail_after(seconds_max):
        while True:
            if holds():
                return
            await trio.sleep(POLL_S)
