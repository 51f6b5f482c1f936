"""When a request was where: the times of its phases and of its deadlines."""

from tidegate.scheduler.phases import Phase


class Times:
    """How long a request was in each phase, in microseconds, and when its marks were."""

    def __init__(self, received_us: int) -> None:
        self.received_us = received_us
        self.first_token_us: int | None = None
        self.spent_us: dict[Phase, int] = {}
        self._since_us = received_us

    def leave(self, phase: Phase, now_us: int) -> None:
        self.spent_us[phase] = self.spent_us.get(phase, 0) + now_us - self._since_us
        self._since_us = now_us


def due_us(received_us: int, timeout_ms: int | None) -> int | None:
    return None if timeout_ms is None else received_us + timeout_ms * 1000
