"""How much of request bodies may be held in memory, for one request and for all together."""

from collections.abc import Generator
from contextlib import contextmanager

from tidegate.clients.proxy.errors import ApiError


class Share:
    """What one request has taken of the budget."""

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self._byte_count = 0

    def take(self, byte_count: int) -> None:
        """Raises `ApiError` 413 when this body is too large, 503 when all bodies are."""
        budget = self._budget
        if self._byte_count + byte_count > budget.each_max:
            raise ApiError(
                413,
                f"the body must have at most {budget.each_max} bytes",
                code="body_too_large",
            )
        if budget.used + byte_count > budget.total_max:
            raise ApiError(
                503, "too many large requests are being read; try again", code="overloaded"
            )
        self._byte_count += byte_count
        budget.used += byte_count

    def release(self) -> None:
        """The body is not needed any more. May be called again."""
        self._budget.used -= self._byte_count
        self._byte_count = 0


class BodyBudget:
    """Bytes of bodies that are being read, parsed and tokenised."""

    def __init__(self, each_max: int, total_max: int) -> None:
        self.each_max = each_max
        self.total_max = total_max
        self.used = 0

    @contextmanager
    def share(self) -> Generator[Share]:
        """Room for one request's body, given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            share.release()
