"""Prompts to ids from a model's card."""

import json
import threading

import pytest
import trio

from fakes.cards import card_of, with_tokenizer
from fakes.tiny_tokenizers import BEGIN, END, byte_level, first_metaspace, sentencepiece
from tidegate.clients.tokeniser import INLINE_CHARACTERS_MAX, Tokeniser, TokeniserError


def test_control_tokens_in_a_prompt_are_text() -> None:
    tokenizer = byte_level()
    ids = Tokeniser(card_of(tokenizer)).encode(f"a{END}b")
    assert tokenizer.token_to_id(END) not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{END}b"


def test_begin_token_is_added_when_the_model_wants_it() -> None:
    tokenizer = sentencepiece()
    begin = tokenizer.token_to_id(BEGIN)
    assert Tokeniser(card_of(tokenizer, bos_token=BEGIN)).encode("") == [begin]
    assert Tokeniser(card_of(tokenizer)).encode("") == []
    assert begin not in Tokeniser(card_of(tokenizer)).encode("a")


def test_a_tokenizers_own_additions_and_truncation_are_off() -> None:
    card = card_of(byte_level())
    file = json.loads(card.tokenizer_json)
    file["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": END, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {END: {"id": END, "ids": [2], "tokens": [END]}},
    }
    changed = with_tokenizer(card, json.dumps(file).encode())
    text = "the cat sat on the mat"
    assert Tokeniser(changed).encode(text) == Tokeniser(card).encode(text)


def test_only_the_first_part_of_a_text_gets_a_first_space() -> None:
    tokeniser = Tokeniser(card_of(first_metaspace()))
    assert tokeniser.encode_part("a", is_first=True) == tokeniser.encode_part(
        " a", is_first=False
    )
    assert tokeniser.encode_part("a", is_first=False) != tokeniser.encode_part(
        "a", is_first=True
    )


def test_a_broken_tokenizer_is_named() -> None:
    card = with_tokenizer(card_of(byte_level(), name="tiny"), b"{}")
    with pytest.raises(TokeniserError, match="the tokenizer of tiny is broken"):
        Tokeniser(card)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        Tokeniser(card_of(byte_level())).text_stream(stops=[""])


async def test_long_text_is_encoded_in_another_thread() -> None:
    tokeniser = Tokeniser(card_of(byte_level()))
    threads: list[int] = []

    def encode() -> list[int]:
        threads.append(threading.get_ident())
        return []

    await tokeniser.run_async(encode, INLINE_CHARACTERS_MAX)
    await tokeniser.run_async(encode, INLINE_CHARACTERS_MAX + 1)
    assert threads[0] == threading.get_ident()
    assert threads[1] != threading.get_ident()


async def test_other_tasks_go_on_while_long_text_is_encoded() -> None:
    tokeniser = Tokeniser(card_of(byte_level()))
    text = "the cat sat on the mat " * 60_000
    gaps: list[float] = []

    async def watch() -> None:
        while True:
            before = trio.current_time()
            await trio.sleep(0.005)
            gaps.append(trio.current_time() - before)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        began = trio.current_time()
        ids = await tokeniser.encode_async(text)
        took = trio.current_time() - began
        nursery.cancel_scope.cancel()
    assert ids == tokeniser.encode(text)
    assert len(gaps) > took / 0.05  # Holding the lock all the time would leave a gap or two.


async def test_a_cancelled_encoding_is_left_behind() -> None:
    tokeniser = Tokeniser(card_of(byte_level()))
    release = threading.Event()

    def encode() -> list[int]:
        release.wait(10)
        return []

    with trio.move_on_after(0.01) as scope:
        await tokeniser.run_async(encode, INLINE_CHARACTERS_MAX + 1)
    release.set()
    assert scope.cancelled_caught
