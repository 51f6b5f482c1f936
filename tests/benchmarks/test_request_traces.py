"""Traces: both public forms, ticks that are spread, and files that are no trace."""

from pathlib import Path

import pytest

from request_traces import TraceError, TraceRequest, read_trace, spread_ticks, unit_hashes

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05,110,27
"""
MOONCAKE = """\
{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [4, 5]}
{"timestamp": 3000, "input_length": 600, "output_length": 6, "hash_ids": [4, 6]}
{"timestamp": 6000, "input_length": 512, "output_length": 7, "hash_ids": [4]}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_traces_are_read_from_the_first_request_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "code.csv", AZURE)
    assert read_trace(path, None) == [
        TraceRequest(0, 4808, 10),
        TraceRequest(52_000, 3180, 8),
        TraceRequest(1_020_040, 110, 27),
    ]
    assert read_trace(path, 1, first=1) == [TraceRequest(0, 3180, 8)]


def test_mooncake_traces_have_blocks_and_their_ticks_are_spread(tmp_path: Path) -> None:
    path = write(tmp_path, "conversation.jsonl", MOONCAKE)
    assert read_trace(path, 3) == [
        TraceRequest(0, 700, 5, (4, 5)),
        TraceRequest(1_500_000, 600, 6, (4, 6)),
        TraceRequest(3_000_000, 512, 7, (4,)),
    ]


def test_the_last_tick_is_spread_as_the_one_before_it() -> None:
    at = [TraceRequest(time_us, 1, 1) for time_us in (0, 100, 100, 300, 300, 300, 300)]
    assert [request.at_us for request in spread_ticks(at)] == [
        0,
        100,
        200,
        300,
        350,
        400,
        450,
    ]


def test_a_single_tick_stays_as_it_is() -> None:
    assert [r.at_us for r in spread_ticks([TraceRequest(5, 1, 1)] * 2)] == [5, 5]


def test_prompts_of_the_same_blocks_have_the_same_hashes_as_far_as_they_go() -> None:
    first = unit_hashes(TraceRequest(0, 700, 5, (4, 5)), 64)
    second = unit_hashes(TraceRequest(0, 600, 6, (4, 6)), 64)
    assert len(first) == 10 and len(second) == 9  # Full units only.
    assert first[:8] == second[:8] and first[8] != second[8]
    assert len(set(first)) == 10
    assert unit_hashes(TraceRequest(0, 700, 5), 64) == ()


def test_units_have_to_divide_the_blocks() -> None:
    with pytest.raises(ValueError, match="48 tokens do not divide 512"):
        unit_hashes(TraceRequest(0, 700, 5, (4, 5)), 48)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.csv", AZURE + "2023-11-16 18:17:05,many,27\n", "line 5"),
        ("a.csv", "TIME,TOKENS\n1,2\n", "line 2"),
        ("a.jsonl", MOONCAKE + '{"timestamp": 1}\n', "line 4"),
        ("a.jsonl", "", "it has 0 requests"),
    ],
)
def test_a_file_that_is_no_trace_is_named_with_the_line(
    tmp_path: Path, name: str, text: str, line: str
) -> None:
    with pytest.raises(TraceError, match=line):
        read_trace(write(tmp_path, name, text), None)
