"""Tells when the scheduler has been silent for too long while something is due from it."""

import trio

GRACE_S = 0.05  # If this process itself was held up, frames may lie unread for a moment.


class Silence:
    """`expect` when something is asked, `rest` when nothing is open, `heard` for each frame."""

    def __init__(self, seconds_max: float) -> None:
        self.seconds_max = seconds_max
        self._is_due = trio.Event()
        self._since = 0.0

    def expect(self) -> None:
        """Something should come from now on."""
        if not self._is_due.is_set():
            self._since = trio.current_time()
            self._is_due.set()

    def rest(self) -> None:
        """Nothing more is due."""
        if self._is_due.is_set():
            self._is_due = trio.Event()

    def heard(self) -> None:
        """Something has come."""
        self._since = trio.current_time()

    async def wait(self) -> None:
        """Return when nothing has come for `seconds_max` although it was due."""
        while not self._is_too_long():
            await self._is_due.wait()
            await trio.sleep_until(self._since + self.seconds_max)
            if self._is_too_long():
                await trio.sleep(GRACE_S)

    def _is_too_long(self) -> bool:
        over = trio.current_time() >= self._since + self.seconds_max
        return over and self._is_due.is_set()
