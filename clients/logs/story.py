"""`tidegate logs story`: everything that a log tells of one request, in order of time."""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from tidegate.clients.logs.lines import (
    UNREADABLE,
    EventLine,
    LineCount,
    decode_event,
    decode_fields,
    read_lines,
)
from tidegate.ipc.log_events import LogEvent

NAMES_SHOWN_MAX = 10
ID_FIELDS = ("request_id", "client_request_id", "http_id")
# The proxy's answers are called KIND-HTTP_ID-REQUEST_ID.
_ANSWER_ID = re.compile(r"(?:chat)?cmpl-(?:[0-9a-f]{16}-(?=.))?")
_HEAD = frozenset({"time", "level", "process", "pid", "event", "request_id"})
_MICROSECOND = timedelta(microseconds=1)


class NoSuchRequest(Exception):
    """No request is meant by a name, or more than one; the text says which."""


class StoryLine(msgspec.Struct, frozen=True):
    """One event. `at_us` counts from the request's first line; `fields` are its own."""

    at_us: int
    process: str
    event: str
    fields: Mapping[str, object]


class Story(msgspec.Struct, frozen=True):
    """`end` is the line that sums the request up, or its refusal; None if it still runs."""

    request_id: str
    start: datetime
    lines: tuple[StoryLine, ...]
    counted: LineCount

    @property
    def end(self) -> StoryLine | None:
        wanted = (LogEvent.REQUEST_FINISHED.value, LogEvent.REQUEST_REFUSED.value)
        return next((line for line in self.lines if line.event in wanted), None)


def tell(path: Path, name: str) -> Story:
    """The story of the request called `name`: its id in the log, the client's, the HTTP
    answer's or its x-request-id, in full or a beginning that no other has.

    Raises `NoSuchRequest` and `LogFileError`.
    """
    request_id = find_request(path, name)
    counted = LineCount()
    told = [
        (head, fields)
        for head, fields in _lines_with(path, request_id, counted)
        if head.request_id == request_id
    ]
    told.sort(key=lambda one: one[0].time)  # Of equal times, the one written first comes first.
    start = told[0][0].time
    lines = tuple(
        StoryLine(
            (head.time - start) // _MICROSECOND,
            head.process,
            head.event,
            {key: value for key, value in fields.items() if key not in _HEAD},
        )
        for head, fields in told
    )
    return Story(request_id, start, lines, counted)


def find_request(path: Path, name: str) -> str:
    """The id, in the log, of the request that `name` means. Raises as `tell`."""
    sought = name[match.end() :] if (match := _ANSWER_ID.match(name)) else name
    if not sought:
        raise NoSuchRequest("a request's id is needed")
    exact: dict[str, None] = {}
    beginning: dict[str, None] = {}
    for head, fields in _lines_with(path, sought, LineCount()):
        if head.request_id is None:
            continue
        for field in ID_FIELDS:
            value = fields.get(field)
            if value == sought:
                exact[head.request_id] = None
            elif isinstance(value, str) and value.startswith(sought):
                beginning[head.request_id] = None
    found = list(exact or beginning)
    if len(found) == 1:
        return found[0]
    if not found:
        raise NoSuchRequest(f"no request in {path} has an id that is or begins with {name!r}")
    shown = ", ".join(found[:NAMES_SHOWN_MAX]) + (", …" if len(found) > NAMES_SHOWN_MAX else "")
    raise NoSuchRequest(f"{name!r} may mean any of {len(found)} requests: {shown}")


def _lines_with(
    path: Path, text: str, counted: LineCount
) -> Iterator[tuple[EventLine, dict[str, object]]]:
    """The events whose line holds `text` somewhere."""
    # As it stands in a line, without the quotes.
    wanted = msgspec.json.encode(text)[1:-1]
    for line in read_lines(path, counted):
        if wanted not in line:
            continue
        try:
            yield decode_event(line), decode_fields(line)
        except UNREADABLE:
            counted.foreign += 1
