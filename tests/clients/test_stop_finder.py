"""Stop strings in text that comes in pieces: the cut depends on the text alone."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.clients.stop_finder import StopFinder

letters = st.text(alphabet="ab€", max_size=30)
stops = st.lists(st.text(alphabet="ab€", min_size=1, max_size=6), max_size=4)


def run(finder: StopFinder, pieces: Sequence[str]) -> tuple[list[str], bool]:
    """What is released for each piece and at the end, and whether the text was cut."""
    released: list[str] = []
    for piece in pieces:
        text, stopped = finder.push(piece)
        released.append(text)
        if stopped:
            return released, True
    text, stopped = finder.finish()
    return [*released, text], stopped


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    starts = [start for stop in stops if (start := text.find(stop)) >= 0]
    return (text[: min(starts)], True) if starts else (text, False)


@given(letters, stops, st.lists(st.integers(0, 30), max_size=8))
@example("aab", ["aab", "ab"], [2])
@example("xabcabd", ["abcabd", "ca"], [])
def test_the_text_is_cut_at_the_earliest_stop_string(
    text: str, stops: list[str], edges: list[int]
) -> None:
    bounds = [0, *sorted(edges), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    released, stopped = run(StopFinder(stops), pieces)
    assert ("".join(released), stopped) == cut(text, stops)


@given(letters, stops)
def test_what_cannot_become_a_stop_string_is_released_at_once(
    text: str, stops: list[str]
) -> None:
    whole, _ = cut(text, stops)
    finder = StopFinder(stops)
    got = ""
    for index, character in enumerate(text, start=1):
        new, stopped = finder.push(character)
        got += new
        if stopped:
            break
        if index <= len(whole):
            held = whole[len(got) : index]
            assert not held or any(stop.startswith(held) for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopFinder(["a", ""])


def test_an_earlier_stop_string_in_the_making_is_waited_for() -> None:
    assert run(StopFinder(["abcd", "bc"]), ["abc", "d"]) == (["", ""], True)
    assert run(StopFinder(["abcd", "bc"]), ["abc", "x"]) == (["", "a"], True)
    assert run(StopFinder(["abcd", "bc"]), ["abc"]) == (["", "a"], True)


def test_without_stop_strings_all_text_passes() -> None:
    assert run(StopFinder([]), ["ab", "", "c"]) == (["ab", "", "c", ""], False)
