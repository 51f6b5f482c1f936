"""Control tokens in text, found as the tokenizers package finds them."""

import re
import time

from hypothesis import given
from hypothesis import strategies as st

from tidegate.clients.control_tokens import ControlToken, ControlTokens

contents = st.lists(st.text(alphabet="<|a>", min_size=1, max_size=5), unique=True, max_size=5)


def control(*contents: str) -> ControlTokens:
    return ControlTokens(ControlToken(index, text) for index, text in enumerate(contents))


@given(contents, st.text(alphabet="<|a>x", max_size=30))
def test_the_longest_of_the_leftmost_is_found(contents: list[str], text: str) -> None:
    by_length = sorted(contents, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, by_length)) or "(?!)")
    found = [(each.start, each.end) for each in control(*contents).find(text)]
    assert found == [match.span() for match in pattern.finditer(text)]
    assert all(
        text[each.start : each.end] == each.token.content
        for each in control(*contents).find(text)
    )


def test_first_characters_that_mean_something_in_patterns_are_plain() -> None:
    tokens = control("^a", "]b", "-c", "\\d", "[INST]")
    assert [each.token.content for each in tokens.find("x^a]b-c\\d[INST]-x")] == [
        "^a",
        "]b",
        "-c",
        "\\d",
        "[INST]",
    ]


def test_many_tokens_that_begin_alike_cost_little() -> None:
    tokens = control(*(f"<unused{number}>" for number in range(6000)))
    began = time.process_time()
    assert not list(tokens.find("<" * 200_000))
    assert not list(tokens.find("<un" * 50_000))
    assert len(list(tokens.find("<unused77>" * 1000))) == 1000
    assert time.process_time() - began < 2
