"""A log line is bounded, is JSON whatever is in it, and is one line for every reader."""

import json
from typing import Any

import numpy as np
import pytest

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.log_line import (
    EXCEPTION_CHARS_MAX,
    EXCEPTION_COUNT_MAX,
    FIELD_CHARS_MAX,
    FRAME_COUNT_MAX,
    LIST_ITEMS_MAX,
    LineWriter,
    cut_value,
    describe_exception,
    encode_line,
)


def decoded(value: object) -> Any:
    encoded = encode_line({"field": value})
    assert encoded.endswith(b"\n")
    assert len(encoded.decode().splitlines()) == 1
    return json.loads(encoded)["field"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (-5, -5),
        (2**70, 2**70),
        (1.5, 1.5),
        (float("nan"), None),
        (float("inf"), None),
        ("text", "text"),
        ('quote " and \\', 'quote " and \\'),
        ("two\nlines\r\n", "two\nlines\r\n"),
        ("\x85 \u2028 \u2029 \x0b \x1c", "\x85 \u2028 \u2029 \x0b \x1c"),
        ("Größe 🌊", "Größe 🌊"),
        ("half \ud83c a pair", "half ? a pair"),
        (LogEvent.LAUNCH, "launch"),
        (b"tokens", "<6 bytes>"),
        (bytearray(3), "<3 bytes>"),
        ((1, [2, "x"], ()), [1, [2, "x"], []]),
        ({"a": {"b": b""}, 3: None}, {"a": {"b": "<0 bytes>"}, "3": None}),
        (np.int64(7), 7),
        (np.float64(0.5), 0.5),
        (np.str_("text"), "text"),
        ({1, 2}, "<set>"),
        pytest.param(object(), "<object>", id="object"),
    ],
    ids=repr,
)
def test_any_value_becomes_json_on_one_line(value: object, expected: object) -> None:
    assert decoded(value) == expected


def test_long_text_is_cut_and_says_by_how_much() -> None:
    assert decoded("x" * FIELD_CHARS_MAX) == "x" * FIELD_CHARS_MAX
    cut = decoded("x" * (FIELD_CHARS_MAX + 10))
    assert cut == "x" * FIELD_CHARS_MAX + "… (10 more characters)"
    assert decoded({"a": ["x" * 1_000_000]})["a"][0].endswith("more characters)")


def test_long_lists_and_mappings_are_cut_and_say_by_how_much() -> None:
    assert decoded(range(LIST_ITEMS_MAX)) == list(range(LIST_ITEMS_MAX))
    cut = decoded(list(range(LIST_ITEMS_MAX + 5)))
    assert cut == [*range(LIST_ITEMS_MAX), "… 5 more"]
    mapping = decoded({str(number): number for number in range(LIST_ITEMS_MAX + 5)})
    assert len(mapping) == LIST_ITEMS_MAX + 1
    assert mapping["…"] == "5 more"


def test_a_value_that_contains_itself_ends() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert "<nested too deep>" in json.dumps(cut_value(endless))


def test_an_exceptions_message_places_and_causes_are_bounded() -> None:
    def deep(depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 10_000)
        deep(depth - 1)

    with pytest.raises(ValueError, match="x") as caught:
        deep(100)
    (described,) = describe_exception(caught.value)
    assert len(str(described["message"])) < EXCEPTION_CHARS_MAX + 40
    frames = described["frames"]
    assert isinstance(frames, list)
    assert len(frames) == FRAME_COUNT_MAX
    group = ExceptionGroup("many", [KeyError(number) for number in range(50)])
    assert len(describe_exception(group)) == EXCEPTION_COUNT_MAX


def test_an_exception_without_a_readable_message_is_still_described() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even this")

    (described,) = describe_exception(Broken())
    assert described["message"] == "<no message: RuntimeError>"


def test_a_suppressed_context_is_left_out_and_a_plain_one_is_not() -> None:
    def fail(hide: bool) -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            if hide:
                raise ValueError("second") from None
            raise ValueError("second") from error

    for hide, count in ((True, 1), (False, 2)):
        with pytest.raises(ValueError, match="second") as caught:
            fail(hide)
        assert len(describe_exception(caught.value)) == count


def test_lines_that_cannot_be_written_are_counted() -> None:
    writer = LineWriter(-1)  # No such descriptor.
    writer.write(b"x\n")
    assert writer.lost_count == 1
    writer.close()
    writer.write(b"x\n")
    assert writer.lost_count == 2
