"""One log line: fields cut to bounds, exceptions without values, and a single write.

A line holds no more than was asked for: of an exception its type, the beginning of its message
and the places in the code, but no source text and no variable, since those may hold a prompt.
"""

import os
import traceback
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from operator import index
from types import TracebackType
from typing import Any, SupportsIndex, TypeAlias, cast

import msgspec

LEVELS = ("debug", "info", "warning", "error")
DEFAULT_LEVEL = "info"

FIELD_CHARS_MAX = 4096
LIST_ITEMS_MAX = 256
NESTING_MAX = 8
EXCEPTION_CHARS_MAX = 300  # Of an exception's message.
EXCEPTION_COUNT_MAX = 8  # Causes and members of groups together.
FRAME_COUNT_MAX = 30  # The innermost ones of each exception.

LogValue: TypeAlias = (
    "str | int | float | bool | Sequence[LogValue] | Mapping[str, LogValue] | None"
)
Line: TypeAlias = MutableMapping[str, Any]

# Characters that some readers of text take for the end of a line, and their JSON escapes.
_LINE_ENDS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]


class LineWriter:
    """Appends lines to a file or a stream that other processes write to as well.

    Each line is one write to a descriptor in append mode, so lines of several processes do
    not run into each other, however long. A line that cannot be written (the disk is full)
    is counted and dropped: the log never stops what it tells of.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self.lost_count = 0

    def write(self, line: bytes) -> None:
        if self._descriptor is None:
            self.lost_count += 1
            return
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):  # Only a full disk or pipe splits a line.
                os.write(self._descriptor, line[written:])
        except OSError:
            self.lost_count += 1

    debug = info = warning = error = write  # What structlog calls, by level.

    def close(self) -> None:
        """Close a file. Lines that come later are dropped."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and descriptor > 2:
            os.close(descriptor)


def head(process: str, level: str, event: str) -> Line:
    """The fields with which every line begins, in their order."""
    now = datetime.now(UTC).replace(tzinfo=None)
    return {
        "time": now.isoformat(timespec="microseconds") + "Z",
        "level": level,
        "process": process,
        "pid": os.getpid(),
        "event": event,
    }


def encode_line(line: Line) -> bytes:
    """JSON and a line feed. Never raises: what JSON cannot say becomes a description of it."""
    cut = {name: cut_value(value) for name, value in line.items()}
    encoded = msgspec.json.encode(cut)
    if not encoded.isascii():
        for character, escape in _LINE_ENDS:
            encoded = encoded.replace(character, escape)
    return encoded + b"\n"


def cut_value(value: object, depth: int = 0) -> object:
    """`value` with long strings and lists cut, and made of what JSON knows."""
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case str():
            return _cut_text(value, FIELD_CHARS_MAX)
        case bytes() | bytearray():
            return f"<{len(value)} bytes>"  # May be tokens, and with them a prompt.
        case Mapping() | Sequence() if depth >= NESTING_MAX:
            return "<nested too deep>"
        case Mapping():
            return _cut_mapping(cast("Mapping[object, object]", value), depth)
        case Sequence():
            return _cut_sequence(cast("Sequence[object]", value), depth)
        case SupportsIndex():  # An integer of another library.
            return index(value)
        case _:
            return f"<{type(value).__name__}>"


def _cut_text(text: str, chars_max: int) -> str:
    text = str.__str__(text)  # Of a subclass, the plain text.
    if len(text) > chars_max:
        text = f"{text[:chars_max]}… ({len(text) - chars_max} more characters)"
    return text if text.isascii() else text.encode(errors="replace").decode()


def _cut_mapping(value: Mapping[object, object], depth: int) -> dict[str, object]:
    items = list(value.items())
    cut = {
        _cut_text(str(name), EXCEPTION_CHARS_MAX): cut_value(item, depth + 1)
        for name, item in items[:LIST_ITEMS_MAX]
    }
    if len(items) > LIST_ITEMS_MAX:
        cut["…"] = f"{len(items) - LIST_ITEMS_MAX} more"
    return cut


def _cut_sequence(value: Sequence[object], depth: int) -> list[object]:
    cut = [cut_value(item, depth + 1) for item in value[:LIST_ITEMS_MAX]]
    if len(value) > LIST_ITEMS_MAX:
        cut.append(f"… {len(value) - LIST_ITEMS_MAX} more")
    return cut


def describe_exception(error: BaseException) -> list[dict[str, LogValue]]:
    """The exception, its causes and, of a group, its members: the outermost first."""
    described: list[dict[str, LogValue]] = []
    waiting = [error]
    while waiting and len(described) < EXCEPTION_COUNT_MAX:
        current = waiting.pop(0)
        described.append(
            {
                "type": type(current).__qualname__,
                "message": _cut_text(_message(current), EXCEPTION_CHARS_MAX),
                "frames": _frames(current.__traceback__),
            }
        )
        if isinstance(current, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", current)
            waiting.extend(group.exceptions)
        if current.__cause__ is not None:
            waiting.append(current.__cause__)
        elif current.__context__ is not None and not current.__suppress_context__:
            waiting.append(current.__context__)
    return described


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"<no message: {type(failure).__name__}>"


def _frames(trace: TracebackType | None) -> list[str]:
    frames = [
        f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(trace)
    ]
    return frames[-FRAME_COUNT_MAX:]
