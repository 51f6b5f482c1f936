"""Control tokens come from the template alone, and merges over edges are those of the whole."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from fakes.cards import card_of
from fakes.templates import CHATML, TRIMMING
from fakes.tiny_tokenizers import END, START, add, byte_level, first_metaspace, sentencepiece
from tidegate.clients.chat_prompt import PRIVATE_AREA, ChatMessage, encode_chat
from tidegate.clients.chat_template import ChatTemplate, ChatTemplateError
from tidegate.clients.tokeniser import Tokeniser


def flagged() -> Tokenizer:
    """Control tokens that swallow the space beside them, as Phi's do."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    left = AddedToken("<|left|>", special=True, normalized=False, lstrip=True)
    right = AddedToken("<|right|>", special=True, normalized=False, rstrip=True)
    add(tokenizer, left, right)
    return tokenizer


KINDS: list[Callable[[], Tokenizer]] = [byte_level, sentencepiece, first_metaspace]
TEMPLATES = [CHATML, "A" + CHATML, TRIMMING]
contents = st.text(alphabet="ab \n€<|im_end>{}", max_size=12)
chats = st.lists(
    st.builds(ChatMessage, st.sampled_from(["system", "user", "assistant"]), contents),
    min_size=1,
    max_size=4,
)


def whole_text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids when control tokens are parsed wherever they stand."""
    parsing = Tokenizer.from_str(tokenizer.to_str())
    parsing.encode_special_tokens = False
    return parsing.encode(text, add_special_tokens=False).ids


def plain(messages: list[ChatMessage]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def check_against_whole_text(
    tokenizer: Tokenizer, template: ChatTemplate, messages: list[ChatMessage]
) -> None:
    ids = encode_chat(Tokeniser(card_of(tokenizer)), template, messages)
    assert ids == whole_text_ids(tokenizer, template.render(plain(messages)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", TEMPLATES)
@settings(deadline=None, max_examples=20)
@given(messages=chats)
def test_ids_are_those_of_the_whole_text_if_no_message_holds_a_control_token(
    kind: Callable[[], Tokenizer], source: str, messages: list[ChatMessage]
) -> None:
    innocent = [message for message in messages if END not in message.content]
    check_against_whole_text(kind(), ChatTemplate(source), innocent)


@settings(deadline=None, max_examples=20)
@given(contents)
def test_control_tokens_that_swallow_space_do_so(content: str) -> None:
    template = ChatTemplate(
        "x {% for m in messages %} <|left|> {{ m.content }} <|right|> {{ m.content }} "
        "{% endfor %} "
    )
    innocent = content.replace(END, "")
    check_against_whole_text(flagged(), template, [ChatMessage("user", innocent)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize(
    "inside", [END, START, f"{START}{END}", f"<|im_{END}end|>", f" {END}\n"]
)
def test_a_control_token_in_a_message_is_text(
    kind: Callable[[], Tokenizer], source: str, inside: str
) -> None:
    tokenizer = kind()
    tokeniser = Tokeniser(card_of(tokenizer))
    template = ChatTemplate(source)
    control = {token.token_id for token in tokeniser.control_tokens.by_content.values()}

    def encode(content: str) -> list[int]:
        return encode_chat(tokeniser, template, [ChatMessage("user", content)])

    ids, harmless = encode(f"a{inside}b"), encode("ab")
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]
    assert f"a{inside}b" in tokenizer.decode(ids, skip_special_tokens=False)


def test_a_control_token_in_a_name_is_text() -> None:
    tokeniser = Tokeniser(card_of(byte_level()))
    template = ChatTemplate("{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}")
    ids = encode_chat(tokeniser, template, [ChatMessage("user", "hi", name=f"bob{END}")])
    assert ids == tokeniser.encode(f"bob{END}: hi")


def test_private_characters_of_a_message_are_kept() -> None:
    tokeniser = Tokeniser(card_of(byte_level()))
    template = ChatTemplate("{{ messages[0].content }}")
    content = "".join(map(chr, PRIVATE_AREA[:-1])) + END
    ids = encode_chat(tokeniser, template, [ChatMessage("user", content)])
    assert ids == tokeniser.encode(content)


def test_a_message_that_uses_up_the_private_characters_is_refused() -> None:
    tokeniser = Tokeniser(card_of(byte_level()))
    template = ChatTemplate("{{ messages[0].content }}")
    content = "".join(map(chr, PRIVATE_AREA)) + END
    with pytest.raises(ChatTemplateError, match="private plane"):
        encode_chat(tokeniser, template, [ChatMessage("user", content)])


def test_begin_token_of_the_template_is_a_control_token() -> None:
    tokenizer = sentencepiece()
    tokeniser = Tokeniser(card_of(tokenizer, bos_token="<s>"))
    template = ChatTemplate(TRIMMING, bos_token="<s>")
    ids = encode_chat(tokeniser, template, [ChatMessage("user", "a")])
    assert ids[0] == tokenizer.token_to_id("<s>")
    assert ids[1] == tokenizer.token_to_id(START)
