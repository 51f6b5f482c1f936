"""Token ids to text, a few ids at a time, exactly as decoding all of them at once.

What decoding all ids at once gives can change near its end when more ids follow: bytes of one
character lie in several tokens. `Detokeniser.start` gives a `PartialText` for one stream, which
hands text out when no later id can change it, and the rest when the stream ends:

- Byte-level tokenizers: the bytes go through an incremental UTF-8 decoder, which keeps back at
  most the three bytes of a character that is not yet whole.
- Other tokenizers are asked to decode a short window of ids, and what is new in it is handed
  out. With byte fallback, a run of byte tokens is kept back until the run has ended, because
  one bad byte in it turns the whole run into U+FFFD.
"""

import codecs
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:  # Who reads ids alone need not have the package.
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class PartialText(Protocol):
    """The text of one stream of ids. Joined, all that it returns is decode(all ids)."""

    @property
    def is_waiting(self) -> bool:
        """Some text is kept back."""
        ...

    def push(self, token_id: int) -> str:
        """The text that became certain with this id; often empty."""
        ...

    def finish(self) -> str:
        """What was kept back, now that no id follows. Call it once, at the end."""
        ...


class Detokeniser:
    """What the text of a tokenizer's ids needs, computed once and shared by all streams.

    Control tokens (`special` in the tokenizer) and ids that it does not know have no text.
    """

    def __init__(self, tokenizer: "Tokenizer", tokenizer_json: bytes) -> None:
        self._tokenizer = tokenizer
        self._kinds = _decoder_kinds(tokenizer_json)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._token_bytes: dict[int, bytes] = {}  # A cache: one entry for each id seen.

    def start(self, hidden_ids: Collection[int] = ()) -> PartialText:
        """The text of a new stream, in which `hidden_ids` too have no text."""
        hidden = self._special_ids.union(hidden_ids)
        if self._kinds == ["ByteLevel"]:
            return _ByteLevelText(self, hidden)
        return _WindowText(self._tokenizer, self._kinds, hidden)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a byte-level token stands for; none for an unknown id."""
        data = self._token_bytes.get(token_id)
        if data is None:
            data = _byte_level_bytes(self._tokenizer.id_to_token(token_id) or "")
            self._token_bytes[token_id] = data
        return data


class _ByteLevelText:
    def __init__(self, detokeniser: Detokeniser, hidden: frozenset[int]) -> None:
        self._bytes_of = detokeniser.bytes_of
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def is_waiting(self) -> bool:
        return self._decoder.getstate()[0] != b""

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowText:
    """Decodes `window`, whose first ids have been handed out as `shown` and give context."""

    def __init__(
        self, tokenizer: "Tokenizer", kinds: list[str], hidden: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._has_byte_fallback = "ByteFallback" in kinds
        self._splits_characters = "ByteLevel" in kinds
        self._window: list[int] = []
        self._shown_count = 0
        self._shown = ""

    @property
    def is_waiting(self) -> bool:
        return len(self._window) > self._shown_count

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._hidden:
            return ""
        self._window.append(token_id)
        if self._has_byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._window)
        if self._splits_characters and text.endswith("\ufffd"):
            return ""
        new = text[len(self._shown) :]
        # The ids of the new text are the context of the next ones. Without any text they
        # would look like the start of a text, where some decoders drop a space.
        newest = self._window[self._shown_count :]
        newest_text = self._decode(newest)
        if newest_text:
            self._window, self._shown = newest, newest_text
        else:
            self._shown = text
        self._shown_count = len(self._window)
        return new

    def finish(self) -> str:
        return self._decode(self._window)[len(self._shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _decoder_kinds(tokenizer_json: bytes) -> list[str]:
    """The names of the tokenizer's decoders, in order, with sequences unfolded."""

    def unfold(decoder: dict[str, Any] | None) -> Iterable[str]:
        if decoder is None:
            return
        if decoder["type"] == "Sequence":
            for inner in decoder["decoders"]:
                yield from unfold(inner)
        else:
            yield decoder["type"]

    class OnlyDecoder(msgspec.Struct):
        decoder: dict[str, Any] | None = None

    return list(unfold(msgspec.json.decode(tokenizer_json, type=OnlyDecoder).decoder))


def _printable_to_byte() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: this undoes it."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    table = {chr(byte): byte for byte in own}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_PRINTABLE_TO_BYTE = _printable_to_byte()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_PRINTABLE_TO_BYTE[character] for character in token])
    except KeyError:  # An added token is written as it is.
        return token.encode()
