"""Lines of a log file: reading them, and what to do with those that are none of ours.

A log is shared by processes and may be cut anywhere: by a full disk, by a copy of a live file,
by an editor. A line that is no event of ours is counted, never an error.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

LINE_BYTES_MAX = 1024 * 1024  # A longer line is foreign; ours have some kB at most.

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)


class LogFileError(Exception):
    """The log cannot be read; the text names the file and says why."""


class LineCount(msgspec.Struct):
    """How many lines were read, and how many of them were no events of ours."""

    read: int = 0
    foreign: int = 0


class EventLine(msgspec.Struct, frozen=True):
    """What every line has. `time` is in UTC."""

    time: datetime
    event: str
    process: str = ""
    request_id: str | None = None


decode_event = msgspec.json.Decoder(EventLine).decode
decode_fields = msgspec.json.Decoder(dict[str, object]).decode


def read_lines(path: Path, counted: LineCount) -> Iterator[bytes]:
    """The lines of the file that may be events. Raises `LogFileError`."""
    try:
        with path.open("rb") as file:
            while line := file.readline(LINE_BYTES_MAX):
                counted.read += 1
                if line.endswith(b"\n") or len(line) < LINE_BYTES_MAX:
                    yield line
                    continue
                counted.foreign += 1
                while line and not line.endswith(b"\n"):
                    line = file.readline(LINE_BYTES_MAX)
    except OSError as error:
        raise LogFileError(f"{path}: {error.strerror or error}") from None


def count_words(counted: LineCount) -> str:
    """For people: how many lines were read, and how many of them were skipped."""
    text = f"{counted.read:,} line{'' if counted.read == 1 else 's'} read"
    if counted.foreign:
        text += f"; {counted.foreign:,} cut or not of tidegate, and skipped"
    return text
