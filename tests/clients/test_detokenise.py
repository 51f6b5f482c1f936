"""Text of ids a few at a time against decoding all of them at once."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from fakes.tiny_tokenizers import byte_level, sentencepiece
from tidegate.clients.detokenise import Detokeniser

TEXTS = [
    "naïve café 你好 한국어 👩🏽‍🚀🦙 🇧🇷 \n\n\n x",
    "  two spaces in front",
    "a",
    "",
    "日本 <think>",
]


def spaced() -> Tokenizer:
    return sentencepiece(space_prefix=True)


def byte_level_and_strip() -> Tokenizer:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def no_decoder() -> Tokenizer:
    text = byte_level().to_str()
    tokenizer = Tokenizer.from_str(text)
    tokenizer.decoder = None
    return tokenizer


KINDS: list[Callable[[], Tokenizer]] = [
    byte_level,
    sentencepiece,
    spaced,
    byte_level_and_strip,
    no_decoder,
]


def chain(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain(*lists))


def pieces(tokenizer: Tokenizer, ids: list[int], hidden: set[int] | None = None) -> list[str]:
    partial = Detokeniser(tokenizer, tokenizer.to_str().encode()).start(hidden or set())
    return [*(partial.push(token_id) for token_id in ids), partial.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_pieces_joined_are_what_decoding_all_ids_gives(
    kind: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokenizer = kind()
    size = tokenizer.get_vocab_size() + 2  # Two ids that the tokenizer does not know.
    noise = st.lists(st.integers(0, size - 1), max_size=12)
    words = st.sampled_from(TEXTS).map(lambda text: tokenizer.encode(text).ids)
    ids = data.draw(st.lists(noise | words, max_size=4).map(chain))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [byte_level, sentencepiece, spaced])
@pytest.mark.parametrize("text", TEXTS)
def test_text_of_whole_characters_has_no_replacement_mark(
    kind: Callable[[], Tokenizer], text: str
) -> None:
    tokenizer = kind()
    ids = tokenizer.encode(text).ids
    got = pieces(tokenizer, ids)
    assert "".join(got) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in got)


def test_a_character_comes_whole_with_its_last_byte() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("€").ids
    assert len(ids) == 3
    assert pieces(tokenizer, ids) == ["", "", "€", ""]


def test_a_character_cut_short_by_the_end_is_one_replacement_mark() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a€").ids[:-1]
    assert pieces(tokenizer, ids) == ["a", "", "", "\ufffd"]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("€€a").ids
    assert len(ids) == 7
    assert pieces(tokenizer, ids) == ["", "", "", "", "", "", "€€a", ""]


def test_hidden_and_control_tokens_have_no_text() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the<|im_end|> cat").ids
    assert "".join(pieces(tokenizer, ids)) == "the cat"
    cat = ids[-1]
    assert "".join(pieces(tokenizer, ids, hidden={cat})) == tokenizer.decode(ids[:-1])


def test_an_endless_run_of_bad_bytes_costs_the_same_for_each_byte() -> None:
    tokenizer = byte_level()
    bad = tokenizer.encode("€").ids[1]
    got = pieces(tokenizer, [bad] * 1000)
    assert "".join(got) == "\ufffd" * 1000
    assert max(map(len, got)) <= 2
