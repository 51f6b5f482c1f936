"""The log of a process: one JSON line for each event, set up alike in every process."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.log_line import (
    DEFAULT_LEVEL,
    LEVELS,
    LineWriter,
    LogValue,
    describe_exception,
    encode_line,
    head,
)

RATE_LIMITED_INTERVAL_S = 1.0
STDERR = 2
RESERVED = frozenset({"time", "level", "process", "pid", "event", "exception", "suppressed"})

Fields: TypeAlias = Mapping[str, LogValue]


class LogError(Exception):
    """The log cannot be set up. The message names the setting and what would be right."""


class RateLimiter:
    """Lets one of each event through in an interval and counts the rest."""

    def __init__(
        self,
        interval_s: float = RATE_LIMITED_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._open_at: dict[LogEvent, float] = {}
        self._suppressed: dict[LogEvent, int] = {}

    def admit(self, event: LogEvent) -> int | None:
        """None: suppress it. Else let it through: so many were suppressed since the last."""
        now = self._clock()
        if now < self._open_at.get(event, now):
            self._suppressed[event] = self._suppressed.get(event, 0) + 1
            return None
        self._open_at[event] = now + self._interval_s
        return self._suppressed.pop(event, 0)

    def take_suppressed(self) -> dict[LogEvent, int]:
        """The counts that no line has told yet; they begin at zero again."""
        taken, self._suppressed = self._suppressed, {}
        return taken


class Log:
    """Writes events. Fields are keyword arguments; a name in `RESERVED` raises `TypeError`.

    Fields hold no prompt text and no secrets. `configure` makes it, `bind` adds fields.
    """

    def __init__(self, logger: FilteringBoundLogger, limiter: RateLimiter) -> None:
        self._logger = logger
        self._limiter = limiter

    def bind(self, **fields: LogValue) -> "Log":
        """A log whose every line has these fields too."""
        _check_fields(fields)
        return Log(self._logger.bind(**fields), self._limiter)

    def debug(self, event: LogEvent, /, **fields: LogValue) -> None:
        self._logger.debug(_checked(event, fields), **fields)

    def info(self, event: LogEvent, /, **fields: LogValue) -> None:
        self._logger.info(_checked(event, fields), **fields)

    def warning(self, event: LogEvent, /, **fields: LogValue) -> None:
        self._logger.warning(_checked(event, fields), **fields)

    def error(self, event: LogEvent, /, **fields: LogValue) -> None:
        self._logger.error(_checked(event, fields), **fields)

    def exception(self, event: LogEvent, error: BaseException, /, **fields: LogValue) -> None:
        """An error with the exception's type, message and places, but no values."""
        name = _checked(event, fields)
        self._logger.error(name, **fields, exception=describe_exception(error))

    def rate_limited(self, event: LogEvent, /, **fields: LogValue) -> None:
        """A warning that strangers can provoke: one line a second for each event.

        The next line tells in `suppressed` how many were left out since the last.
        """
        name = _checked(event, fields)
        suppressed = self._limiter.admit(event)
        if suppressed is not None:
            self._logger.warning(name, **fields, suppressed=suppressed)

    def report_suppressed(self) -> None:
        """Tell what `rate_limited` left out and no line has told. For a process's end."""
        for event, count in self._limiter.take_suppressed().items():
            self._logger.warning(event.value, suppressed=count)


class _Current:
    """This process's log, once `configure` was called."""

    log: Log | None = None
    writer: LineWriter | None = None


def configure(process: str, path: str | None, level: str = DEFAULT_LEVEL) -> Log:
    """Set up this process's log, and return it.

    Lines are appended to the file at `path` (made if it is missing, for this user only), or
    go to standard error if it is None. Several processes may use one file. Calling it again
    closes the earlier log. Raises `LogError`.
    """
    if level not in LEVELS:
        raise LogError(f"the log level is {level!r}; it can be one of {', '.join(LEVELS)}")
    writer = LineWriter(STDERR if path is None else _open(path))
    bound: FilteringBoundLogger = structlog.wrap_logger(
        writer,
        processors=[_renderer(process)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        context_class=dict,
    ).bind()
    if _Current.writer is not None:
        _Current.writer.close()
    _Current.writer, _Current.log = writer, Log(bound, RateLimiter())
    return _Current.log


def get_logger() -> Log:
    """The log that `configure` set up in this process."""
    assert _Current.log is not None, "configure() comes before get_logger()"
    return _Current.log


def _open(path: str) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise LogError(f"cannot open the log file {Path(path)}: {error.strerror}") from None


def _renderer(process: str) -> Callable[[WrappedLogger, str, EventDict], bytes]:
    def render(_: WrappedLogger, level: str, fields: EventDict) -> bytes:
        line = head(process, level, fields.pop("event"))
        line.update(fields)
        return encode_line(line)

    return render


def _checked(event: LogEvent, fields: Fields) -> str:
    """The event's name. Only declared names are logged, whatever the caller's types say."""
    if type(event) is not LogEvent:
        raise TypeError(f"{event!r} is no LogEvent; declare it in log_events.py")
    _check_fields(fields)
    return event.value


def _check_fields(fields: Fields) -> None:
    if not RESERVED.isdisjoint(fields):
        names = ", ".join(sorted(RESERVED.intersection(fields)))
        raise TypeError(f"a log field cannot be called {names}: every line has its own")
