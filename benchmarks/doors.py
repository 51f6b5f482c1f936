"""Who decides in a fleet, as far as a benchmark sees it; and the door that caps prompts.

The scheduler's core is such a policy. `WindowCapped` is the same core behind another door.
"""

from collections.abc import Iterable
from typing import Protocol

from tidegate.kvcache.layout import Pages, Tokens
from tidegate.scheduler.commands import Command, RefuseRequest
from tidegate.scheduler.core import Core
from tidegate.scheduler.events import Event, Submitted, WorkerJoined


class Policy(Protocol):
    """Events in, commands out: `apply` for all that has arrived, then `plan` once."""

    @property
    def wake_us(self) -> int | None:
        """When `plan` must be called next if nothing arrives before."""
        ...

    def apply(self, event: Event, now_us: int) -> None: ...

    def plan(self, now_us: int) -> list[Command]: ...


class WindowCapped:
    """The real core, but no prompt enters that is longer than the smallest window pool.

    So do servers that count a prompt's window pages as if all of them had to stay. What is let
    in is served as by the core itself.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._cap: Tokens | None = None  # None while no window pool is known.
        self._refused: list[Command] = []

    @property
    def wake_us(self) -> int | None:
        return self._core.wake_us

    def apply(self, event: Event, now_us: int) -> None:
        if isinstance(event, WorkerJoined):
            self._cap = min(window_capacities(event), default=self._cap)
        cap = self._cap
        if isinstance(event, Submitted) and cap is not None and event.prompt_tokens > cap:
            text = f"the prompt has {event.prompt_tokens} tokens, and the window pool {cap}"
            self._refused.append(
                RefuseRequest(event.request_id, 400, "too_long", text, pool="window")
            )
            return
        self._core.apply(event, now_us)

    def plan(self, now_us: int) -> list[Command]:
        refused, self._refused = self._refused, []
        return [*refused, *self._core.plan(now_us)]


def window_capacities(joined: WorkerJoined) -> Iterable[Tokens]:
    """How many tokens each window pool of a worker holds."""
    for group, count in zip(joined.layout.groups, joined.handle.page_counts, strict=True):
        if group.is_window:
            yield group.start_of(Pages(count))
