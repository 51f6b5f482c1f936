"""Reading log files that other programs, crashes and full disks have been at."""

from pathlib import Path

import pytest

from tidegate.clients.logs import lines
from tidegate.clients.logs.lines import LineCount, LogFileError, count_words, read_lines
from tidegate.clients.logs.words import bytes_text, columns, count_text, time_text


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogFileError, match=r"none\.jsonl: No such file"):
        list(read_lines(tmp_path / "none.jsonl", LineCount()))


def test_a_line_without_an_end_is_read_and_an_overlong_one_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 16)
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"one\n" + b"x" * 100 + b"\n" + b"two\nthree")
    counted = LineCount()
    assert list(read_lines(log, counted)) == [b"one\n", b"two\n", b"three"]
    assert counted == LineCount(read=4, foreign=1)


def test_counts_are_told_in_words() -> None:
    assert count_words(LineCount(1, 0)) == "1 line read"
    assert count_words(LineCount(1234, 5)) == (
        "1,234 lines read; 5 cut or not of tidegate, and skipped"
    )


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0 us"),
        (999, "999 us"),
        (1000, "1.0 ms"),
        (999_949, "999.9 ms"),
        (2_345_678, "2.35 s"),
    ],
)
def test_times_are_short(microseconds: int, text: str) -> None:
    assert time_text(microseconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 1024**3, "3.0 GiB"),
        (2**42, "4.0 TiB"),
    ],
)
def test_sizes_are_short(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_counts_have_their_noun_and_columns_are_in_line() -> None:
    assert count_text(1, "page") == "1 page"
    assert count_text(2000, "page") == "2,000 pages"
    assert columns([("a", "10"), ("long", "7")], right=(1,)) == ["a     10", "long   7"]
