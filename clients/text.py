"""The text of one stream of tokens: one path for all who show it, streamed or not.

1. Tokens are pushed as they come; each may add text, or none yet.
2. Text is kept back while it may still become a stop string or is no whole character.
3. When a stop string is found the text ends in front of it: `stopped`. No push follows.
4. Otherwise `finish` hands out what was kept back.

So the joined text is the text of all tokens at once, cut where the first stop string begins,
however the tokens were cut into pieces.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tidegate.clients.detokenise import Detokeniser
from tidegate.clients.stop_finder import StopFinder


class TextPiece(NamedTuple):
    """Text that became certain.

    `kept` counts the tokens of use so far: all that were pushed or, once `stopped`, those up
    to the one that completed the stop string.
    """

    text: str
    stopped: bool
    kept: int


class TextStream:
    """Text of one stream. Tokens in `hidden_ids` (end tokens, stop ids) have no text.

    Raises `ValueError` for an empty stop string.
    """

    def __init__(
        self,
        detokeniser: Detokeniser,
        stops: Sequence[str] = (),
        hidden_ids: Collection[int] = (),
    ) -> None:
        self._text = detokeniser.start(hidden_ids)
        self._finder = StopFinder(stops)
        self._pushed = 0
        self._match_start = -1  # Of the earliest stop string seen so far,
        self._match_kept = 0  # and the tokens up to the one that completed it.

    @property
    def is_waiting(self) -> bool:
        """Some text is kept back, so that `finish` would give some."""
        return self._finder.is_waiting or self._text.is_waiting

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Add tokens. Those behind a stop string are ignored."""
        released: list[str] = []
        for token_id in token_ids:
            self._pushed += 1
            text, stopped = self._finder.push(self._text.push(token_id))
            self._note_match()
            released.append(text)
            if stopped:
                return TextPiece("".join(released), True, self._match_kept)
        return TextPiece("".join(released), False, self._pushed)

    def finish(self) -> TextPiece:
        """The stream has ended: the rest of its text, in which a stop string may still be."""
        text, stopped = self._finder.push(self._text.finish())
        if not stopped:
            rest, stopped = self._finder.finish()
            text += rest
        self._note_match()
        return TextPiece(text, stopped, self._match_kept if stopped else self._pushed)

    def _note_match(self) -> None:
        match = self._finder.first_match
        if match is not None and match.start != self._match_start:
            self._match_start = match.start
            self._match_kept = self._pushed
