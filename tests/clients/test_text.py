"""The one path from tokens to shown text."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fakes.tiny_tokenizers import byte_level, sentencepiece
from tidegate.clients.detokenise import Detokeniser
from tidegate.clients.text import TextPiece, TextStream

KINDS: list[Callable[[], Tokenizer]] = [byte_level, sentencepiece]


def stream(
    tokenizer: Tokenizer, stops: list[str] | None = None, hidden: set[int] | None = None
) -> TextStream:
    detokeniser = Detokeniser(tokenizer, tokenizer.to_str().encode())
    return TextStream(detokeniser, stops or [], hidden or set())


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def run(text: TextStream, pushes: list[list[int]]) -> TextPiece:
    """All text, whether it was cut, and the tokens kept."""
    shown = ""
    for ids in pushes:
        piece = text.push(ids)
        shown += piece.text
        if piece.stopped:
            return piece._replace(text=shown)
    last = text.finish()
    return last._replace(text=shown + last.text)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_shown_text_is_the_whole_text_cut_at_the_first_stop_string(
    kind: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokenizer = kind()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=20))
    whole = tokenizer.decode(ids)
    place = st.tuples(st.integers(0, len(whole)), st.integers(1, 6))
    inside = place.map(lambda at: whole[at[0] : at[0] + at[1]] or "x")
    stops = data.draw(st.lists(inside | st.text(min_size=1, max_size=3), max_size=3))
    edges = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    bounds = [0, *edges, len(ids)]
    pushes = [ids[start:end] for start, end in itertools.pairwise(bounds)]

    starts = [start for stop in stops if (start := whole.find(stop)) >= 0]
    shown = run(stream(tokenizer, stops), pushes)
    assert shown.text == (whole[: min(starts)] if starts else whole)
    assert shown.stopped == bool(starts)
    assert shown == run(stream(tokenizer, stops), [[token_id] for token_id in ids])


def test_kept_tokens_end_with_the_one_that_completed_the_stop_string() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, *"abcdef")
    assert run(stream(tokenizer, ["cd"]), [ids]) == TextPiece("ab", True, 4)
    assert run(stream(tokenizer, ["cdx", "d"]), [ids]) == TextPiece("abc", True, 4)
    assert run(stream(tokenizer, ["x"]), [ids]) == TextPiece("abcdef", False, 6)


def test_a_stop_string_kept_back_until_the_end_is_found_there() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("a€b").ids[:-1]
    text = stream(tokenizer, ["€"])
    assert text.push(ids) == TextPiece("a", False, 4)
    assert text.finish() == TextPiece("", True, 4)


def test_end_tokens_and_stop_ids_are_not_shown() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "a", "c", "<|im_end|>")
    text = stream(tokenizer, hidden={ids[1]})
    assert run(text, [ids]) == TextPiece("a", False, 3)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        stream(byte_level(), [""])
