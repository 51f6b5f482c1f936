"""`tidegate logs why`: what one request waited for, how long, and what let it go on.

1. A `Stretch` begins with a `request_waits`, and ends with the next one, or with a `Step`.
2. A `Step` is what happened to the request instead of waiting: it was admitted, handed over,
   got its page, or gave way to another.
3. Steps that end a wait name the last of the holders that let pages go in the meantime.
4. A `Pass` is another request that went ahead of it while it waited for pages.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import msgspec

from tidegate.clients.logs.lines import (
    UNREADABLE,
    LineCount,
    decode_event,
    decode_fields,
    read_lines,
)
from tidegate.clients.logs.story import Story, StoryLine, tell
from tidegate.ipc.log_events import LogEvent

STEPS = (
    LogEvent.REQUEST_ADMITTED,
    LogEvent.REQUEST_PREEMPTED,
    LogEvent.HANDOFF_STARTED,
    LogEvent.REQUEST_GOES_ON,
)
ENDS = (LogEvent.REQUEST_FINISHED, LogEvent.REQUEST_REFUSED)
# What another request does when it lets go of its pages on a worker.
RELEASES = (LogEvent.REQUEST_FINISHED, LogEvent.REQUEST_PREEMPTED, LogEvent.DECODE_STARTED)
_RELEASE_MARKS = tuple(f'"{event.value}"'.encode() for event in RELEASES)
LAST_LINE_COUNT = 64  # Lines at the log's end that tell when it ends: some may be foreign.
_MICROSECOND = timedelta(microseconds=1)


class WaitFields(msgspec.Struct, frozen=True):
    """What a `request_waits` says; docs/LOGS.md tells what belongs to which reason."""

    reason: str
    phase: str = ""
    first: str = ""
    ahead: int = 0
    queue_length: int = 0
    role: str = ""
    worker: str = ""
    pool: str = ""
    pages_short: int = 0
    pages_needed: int = 0
    pages_available: int = 0
    pages_draining: int = 0
    pages_cached: int = 0
    holders: dict[str, int] = {}
    holders_left_out: int = 0


class Release(msgspec.Struct, frozen=True):
    """A holder that let `pages` go, `before_us` before the request went on."""

    request_id: str
    pages: int
    event: str
    reason: str  # Of its end; else empty.
    before_us: int


class Stretch(msgspec.Struct, frozen=True, tag="waits"):
    """`lasted_us` from `at_us` on it waited for this. Times count from its first line."""

    at_us: int
    lasted_us: int
    wait: WaitFields


class Step(msgspec.Struct, frozen=True, tag="goes_on"):
    """`worker` is where it was placed, or where it gave pages of `pool` to the request `by`."""

    at_us: int
    event: str
    worker: str
    by: str = ""
    pool: str = ""
    release: Release | None = None
    ahead_of: str = ""  # Who waited for pages when this one was admitted.


class Pass(msgspec.Struct, frozen=True, tag="passed"):
    """Another request began before it on `worker`, where that fitted."""

    at_us: int
    request_id: str
    worker: str


class Why(msgspec.Struct, frozen=True):
    """`total_us` is its time until its end, or until the log's. Its end has an empty
    `end_event` while it is alive, and `is_waiting` says that it waited when the log ended."""

    request_id: str
    start: datetime
    rows: tuple[Stretch | Step | Pass, ...]
    waited_us: int
    total_us: int
    is_waiting: bool
    end_event: str
    end_reason: str  # Why it ended, or the code of its refusal.
    end_text: str
    counted: LineCount


def find_why(path: Path, name: str) -> Why:
    """The waits of the request called `name`. Names and errors are those of `story.tell`."""
    story = tell(path, name)
    end = story.end
    counted = LineCount()
    others = _RestOfLog(path, counted)
    log_end_us = others.read(story)
    total_us = log_end_us if end is None else end.at_us
    rows = [*_rows(story, total_us, others), *others.passes]
    rows.sort(key=lambda row: row.at_us)
    stretches = [row for row in rows if isinstance(row, Stretch)]
    return Why(
        story.request_id,
        story.start,
        tuple(rows),
        sum(stretch.lasted_us for stretch in stretches),
        total_us,
        end is None and bool(rows) and not isinstance(rows[-1], Step),
        "" if end is None else end.event,
        "" if end is None else _text(end, "reason") or _text(end, "code"),
        "" if end is None else _text(end, "text"),
        counted,
    )


class _RestOfLog:
    """What others did meanwhile: who of the holders let pages go, and when."""

    def __init__(self, path: Path, counted: LineCount) -> None:
        self._path = path
        self._counted = counted
        self._releases: list[tuple[int, str, str, str]] = []  # (time, request, event, reason)
        self.passes: list[Pass] = []

    def read(self, story: Story) -> int:
        """Read the file; returns when its last event was, counted as the story does."""
        ids = {name for wait in _waits(story) for name in wait.holders} - {story.request_id}
        last = deque[bytes](maxlen=LAST_LINE_COUNT)
        pass_mark = f'"passed":"{story.request_id}"'.encode()
        for line in read_lines(self._path, self._counted):
            last.append(line)
            if ids and any(mark in line for mark in _RELEASE_MARKS):
                self._take(line, ids, story.start)
            elif pass_mark in line:
                self._take_pass(line, story.start)
        self._releases.sort()
        times_us = [line.at_us for line in story.lines]
        for line in last:
            with suppress(*UNREADABLE):
                times_us.append((decode_event(line).time - story.start) // _MICROSECOND)
        return max(times_us)

    def last_release(
        self, start_us: int, end_us: int, holders: dict[str, int]
    ) -> Release | None:
        """The last of the holders that let pages go between two times."""
        found = None
        for at_us, name, event, reason in self._releases:
            if start_us <= at_us <= end_us and name in holders:
                found = Release(name, holders[name], event, reason, end_us - at_us)
        return found

    def _take(self, line: bytes, ids: set[str], start: datetime) -> None:
        try:
            head = decode_event(line)
            if head.event not in RELEASES or head.request_id not in ids:
                return
            reason = decode_fields(line).get("reason")
        except UNREADABLE:
            self._counted.foreign += 1
            return
        at_us = (head.time - start) // _MICROSECOND
        why = reason if isinstance(reason, str) else ""
        self._releases.append((at_us, head.request_id, head.event, why))

    def _take_pass(self, line: bytes, start: datetime) -> None:
        with suppress(*UNREADABLE):
            head, worker = decode_event(line), decode_fields(line).get("worker")
            if head.event == LogEvent.REQUEST_ADMITTED.value and head.request_id is not None:
                at_us = (head.time - start) // _MICROSECOND
                where = worker if isinstance(worker, str) else ""
                self.passes.append(Pass(at_us, head.request_id, where))


def _waits(story: Story) -> Iterator[WaitFields]:
    return (wait for line in story.lines if (wait := _wait_of(line)) is not None)


def _wait_of(line: StoryLine) -> WaitFields | None:
    """None for other events, and for a line that does not tell what is waited for."""
    if line.event != LogEvent.REQUEST_WAITS.value:
        return None
    try:
        return msgspec.convert(dict(line.fields), WaitFields)
    except msgspec.ValidationError:
        return None


def _rows(story: Story, total_us: int, others: _RestOfLog) -> list[Stretch | Step]:
    """Waits and steps in order. A wait ends when the next of them begins."""
    marks: list[tuple[StoryLine, WaitFields | None]] = []
    for line in story.lines:
        wait = _wait_of(line)
        if wait is not None or line.event in STEPS or line.event in ENDS:
            marks.append((line, wait))
    rows: list[Stretch | Step] = []
    chain: list[Stretch] = []  # Of waits without a step between them.
    last = StoryLine(total_us, "", "", {})
    for (line, wait), (following, _) in pairwise([*marks, (last, None)]):
        if wait is not None:
            stretch = Stretch(line.at_us, max(0, following.at_us - line.at_us), wait)
            chain.append(stretch)
            rows.append(stretch)
        elif line.event in STEPS:
            rows.append(_step(line, chain, others))
            chain = []
    return rows


def _step(line: StoryLine, chain: Sequence[Stretch], others: _RestOfLog) -> Step:
    holders = {name: count for one in chain for name, count in one.wait.holders.items()}
    release = None
    if holders and line.event != LogEvent.REQUEST_PREEMPTED.value:
        release = others.last_release(chain[0].at_us, line.at_us, holders)
    worker = _text(line, "worker") or _text(line, "target")
    by, pool = _text(line, "by"), _text(line, "pool")
    ahead_of = _text(line, "passed")
    return Step(line.at_us, line.event, worker, by, pool, release, ahead_of)


def _text(line: StoryLine, name: str) -> str:
    value = line.fields.get(name)
    return value if isinstance(value, str) else ""
