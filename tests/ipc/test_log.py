"""The log: one JSON line an event, from several processes into one file."""

import json
import subprocess
import sys
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fakes.clock import ManualClock
from tidegate.ipc.log import LogError, RateLimiter, configure, get_logger
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.log_line import LEVELS


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_begins_with_the_same_fields_in_the_same_order(tmp_path: Path) -> None:
    log = configure("scheduler", str(tmp_path / "log"))
    log.info(LogEvent.REQUEST_ADMITTED, request_id="e-1", pages=3, ratio=0.5, worker=None)
    (line,) = read(tmp_path / "log")
    head = ["time", "level", "process", "pid", "event"]
    assert list(line) == [*head, "request_id", "pages", "ratio", "worker"]
    assert (line["level"], line["process"], line["event"]) == (
        "info",
        "scheduler",
        "request_admitted",
    )
    assert (line["request_id"], line["pages"], line["ratio"], line["worker"]) == (
        "e-1",
        3,
        0.5,
        None,
    )


def test_the_time_is_utc_with_microseconds(tmp_path: Path) -> None:
    log = configure("scheduler", str(tmp_path / "log"))
    log.info(LogEvent.PROCESS_STARTED)
    (line,) = read(tmp_path / "log")
    assert len(line["time"]) == len("2026-01-02T03:04:05.678901Z")
    time = datetime.fromisoformat(line["time"])
    assert time.utcoffset() == timedelta(0)
    assert abs(datetime.now(time.tzinfo) - time) < timedelta(minutes=1)


def test_lines_below_the_level_are_left_out(tmp_path: Path) -> None:
    for place, level in enumerate(LEVELS):
        log = configure("scheduler", str(tmp_path / level), level)
        log.debug(LogEvent.SETTING)
        log.info(LogEvent.SETTING)
        log.warning(LogEvent.SETTING)
        log.error(LogEvent.SETTING)
        assert [line["level"] for line in read(tmp_path / level)] == list(LEVELS[place:])


def test_bound_fields_are_on_every_line_of_that_log_alone(tmp_path: Path) -> None:
    log = configure("scheduler", str(tmp_path / "log"))
    bound = log.bind(request_id="e-1").bind(worker="p")
    bound.info(LogEvent.CHUNK_DONE, until=512)
    log.info(LogEvent.CHUNK_DONE)
    first, second = read(tmp_path / "log")
    assert (first["request_id"], first["worker"], first["until"]) == ("e-1", "p", 512)
    assert "request_id" not in second


def test_only_declared_events_are_logged(tmp_path: Path) -> None:
    log = configure("scheduler", str(tmp_path / "log"))
    undeclared: Any = "something_happened"
    for method in (log.debug, log.info, log.warning, log.error, log.rate_limited):
        with pytest.raises(TypeError, match="'something_happened' is no LogEvent"):
            method(undeclared)
    assert read(tmp_path / "log") == []


def test_a_reserved_field_name_is_refused(tmp_path: Path) -> None:
    log = configure("scheduler", str(tmp_path / "log"))
    with pytest.raises(TypeError, match="cannot be called pid"):
        log.info(LogEvent.SETTING, pid=1)
    with pytest.raises(TypeError, match="cannot be called event"):
        log.bind(event="x")


def test_an_unknown_level_or_place_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="the log level is 'loud'; it can be one of debug, info"):
        configure("scheduler", None, "loud")
    path = tmp_path / "missing" / "log"
    with pytest.raises(LogError, match=f"cannot open the log file {path}: No such file"):
        configure("scheduler", str(path))


def test_without_a_path_lines_go_to_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = configure("scheduler", None)
    log.info(LogEvent.PROCESS_STARTED)
    captured = capfd.readouterr()
    assert json.loads(captured.err)["event"] == "process_started"
    assert captured.out == ""


def test_the_file_is_for_this_user_and_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for name in ("first", "second"):
        configure(name, str(path)).info(LogEvent.PROCESS_STARTED)
    assert [line["process"] for line in read(path)] == ["first", "second"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_earlier_log_writes_nothing_after_a_new_configure(tmp_path: Path) -> None:
    earlier = configure("first", str(tmp_path / "first"))
    latest = configure("second", str(tmp_path / "second"))
    earlier.info(LogEvent.PROCESS_STARTED)
    latest.info(LogEvent.PROCESS_STARTED)
    assert get_logger() is latest
    assert read(tmp_path / "first") == []
    assert [line["process"] for line in read(tmp_path / "second")] == ["second"]


WRITER = """
import sys
from tidegate.ipc.log import configure
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.log_line import LEVELS
log = configure(sys.argv[1], sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for number in range(500):
    log.info(LogEvent.LAUNCH, number=number, a=sys.argv[1] * 2500, b=sys.argv[1] * 2500)
"""


def test_long_lines_of_several_processes_never_run_into_each_other(tmp_path: Path) -> None:
    path = tmp_path / "log"
    pipe = subprocess.PIPE
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, name, str(path)], stdin=pipe, stdout=pipe
        )
        for name in "wxyz"
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    lines = read(path)
    for name in "wxyz":
        own = [line for line in lines if line["process"] == name]
        assert [line["number"] for line in own] == list(range(500))
        assert all(line["a"] == line["b"] == name * 2500 for line in own)
    switches = sum(a["process"] != b["process"] for a, b in pairwise(lines))
    assert switches > 3, "the processes did not write at the same time"


def raise_with_locals(secret: str) -> None:
    hidden = secret * 2
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ExceptionGroup("outer", [ValueError(f"{len(hidden)} is odd")]) from error


def test_an_exception_is_logged_with_its_places_and_without_values(tmp_path: Path) -> None:
    log = configure("scheduler", str(tmp_path / "log"))
    try:
        raise_with_locals("my secret prompt")
    except ExceptionGroup as error:
        log.exception(LogEvent.INTERNAL_ERROR, error, request_id="e-1")
    assert "secret" not in (tmp_path / "log").read_text()
    (line,) = read(tmp_path / "log")
    assert (line["level"], line["request_id"]) == ("error", "e-1")
    outer, member, cause = line["exception"]
    assert outer["type"] == "ExceptionGroup"
    assert [place.split()[-1] for place in outer["frames"]] == [
        "test_an_exception_is_logged_with_its_places_and_without_values",
        "raise_with_locals",
    ]
    assert all(place.startswith(f"{__file__}:") for place in outer["frames"])
    assert (member["type"], member["message"]) == ("ValueError", "32 is odd")
    assert (cause["type"], cause["message"]) == ("KeyError", "'inner'")


def test_a_full_disk_stops_nobody(tmp_path: Path) -> None:
    full = Path("/dev/full")  # Every write to it fails as on a full disk.
    log = configure("scheduler", str(full))
    log.info(LogEvent.PROCESS_STARTED)
    log = configure("scheduler", str(tmp_path / "log"))
    log.info(LogEvent.PROCESS_STARTED)
    assert len(read(tmp_path / "log")) == 1


def test_a_repeated_warning_is_one_line_a_second_with_a_count() -> None:
    clock = ManualClock()
    limiter = RateLimiter(clock=clock)
    frame = LogEvent.MALFORMED_FRAME
    assert limiter.admit(frame) == 0
    assert [limiter.admit(frame) for _ in range(5)] == [None] * 5
    assert limiter.admit(LogEvent.CLIENT_TOO_SLOW) == 0
    clock.now += 0.999
    assert limiter.admit(frame) is None
    clock.now += 0.002
    assert limiter.admit(frame) == 6
    assert limiter.admit(frame) is None
    assert limiter.take_suppressed() == {frame: 1}
    assert limiter.take_suppressed() == {}
    clock.now += 2
    assert limiter.admit(frame) == 0


def test_suppressed_warnings_are_told_at_the_end(tmp_path: Path) -> None:
    log = configure("scheduler", str(tmp_path / "log"))
    for number in range(100):
        log.rate_limited(LogEvent.MALFORMED_FRAME, number=number)
    log.report_suppressed()
    log.report_suppressed()
    lines = read(tmp_path / "log")
    assert len(lines) <= 3
    assert len(lines) - 1 + sum(line["suppressed"] for line in lines) == 100
    assert {line["level"] for line in lines} == {"warning"}


def test_the_event_names_load_nothing_else() -> None:
    script = (
        "import sys, tidegate.ipc.log_events;"
        "print([m for m in ('structlog', 'zmq', 'trio', 'msgspec') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr
