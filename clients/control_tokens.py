"""Finds control tokens in text.

A vocabulary may have thousands of them that begin alike, and a text of a stranger may have
millions of places where one could begin: so a place costs a look-up or two.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

PREFIX_LENGTH = 2  # Characters by which tokens are looked up.


class ControlToken(msgspec.Struct, frozen=True):
    """A token that only the chat template may write. Stripping as in the tokenizer's file."""

    token_id: int
    content: str
    strips_left: bool = False
    strips_right: bool = False


class Occurrence(NamedTuple):
    """A control token at the text's characters [start, end)."""

    start: int
    end: int
    token: ControlToken


class ControlTokens:
    """The control tokens of a vocabulary; none of them has an empty text."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self.by_content = {token.content: token for token in tokens}
        lengths: dict[str, set[int]] = {}
        for content in self.by_content:
            lengths.setdefault(content[:PREFIX_LENGTH], set()).add(len(content))
        # For each beginning, how long the tokens are that begin so, the longest first.
        self._lengths = {prefix: sorted(each, reverse=True) for prefix, each in lengths.items()}
        firsts = "".join(sorted({re.escape(content[0]) for content in self.by_content}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")  # "(?!)" never matches.

    def find(self, text: str) -> Iterator[Occurrence]:
        """Occurrences from left to right: of those that begin at one place the longest, and
        none that overlaps the one before."""
        free = 0
        for candidate in self._first.finditer(text):
            start = candidate.start()
            if start < free:
                continue
            token = self._token_at(text, start)
            if token is not None:
                free = start + len(token.content)
                yield Occurrence(start, free, token)

    def _token_at(self, text: str, start: int) -> ControlToken | None:
        longest = self._lengths.get(text[start : start + PREFIX_LENGTH], [])
        # A token of one character is looked up by less than others.
        for length in (*longest, 1):
            token = self.by_content.get(text[start : start + length])
            if token is not None:
                return token
        return None
