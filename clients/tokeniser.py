"""Text to token ids and back, from a model's card alone.

User text is text: what looks like a control token in it is encoded letter by letter. Only a
chat template's own parts may become control tokens (see `chat_prompt`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import trio
from tokenizers import Tokenizer

from tidegate.clients.control_tokens import ControlToken, ControlTokens
from tidegate.clients.detokenise import Detokeniser
from tidegate.clients.text import TextStream
from tidegate.ipc.protocol import ModelCard

TOKENISE_THREADS_MAX = 2  # Prompts that are tokenised at a time; others wait.
INLINE_CHARACTERS_MAX = 2000  # About a millisecond: less than it costs to ask a thread.


class TokeniserError(Exception):
    """The card's tokenizer cannot be used; the text says why."""


class Tokeniser:
    """A model's tokenizer. Building it takes up to a second or two: do it once, in a thread.

    All methods may be called from several threads at a time. `card` is the given one without
    its tokenizer.json, which may have dozens of megabytes and is not needed any more.
    Raises `TokeniserError` when the card's tokenizer.json cannot be read.
    """

    def __init__(self, card: ModelCard) -> None:
        self.card = msgspec.structs.replace(card, tokenizer_json=b"")
        try:
            self._tokenizer = _load(card.tokenizer_json)
        except Exception as error:  # The package raises bare `Exception`.
            raise TokeniserError(f"the tokenizer of {card.name} is broken: {error}") from error
        inner = _without_first_prefix(card.tokenizer_json)
        self._inner = self._tokenizer if inner is None else _load(inner)
        self._detokeniser = Detokeniser(self._tokenizer, card.tokenizer_json)
        self._limiter = trio.CapacityLimiter(TOKENISE_THREADS_MAX)
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_tokens = ControlTokens(
            ControlToken(token_id, token.content, token.lstrip, token.rstrip)
            for token_id, token in added.items()
            if token.special and token.content
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the begin token in front if the model wants one.

        For long text use `encode_async`: this takes about a second for each megabyte.
        """
        begin = [self.card.bos_id] if self.card.add_bos and self.card.bos_id is not None else []
        return begin + self.encode_part(text, is_first=True)

    async def encode_async(self, text: str) -> list[int]:
        """`encode`, without keeping other tasks waiting; a cancelled call is abandoned."""
        return await self.run_async(partial(self.encode, text), len(text))

    async def run_async(
        self, encode: Callable[[], list[int]], character_count: int
    ) -> list[int]:
        """Call `encode` here if the text is short, in a thread of the tokeniser's if not."""
        if character_count <= INLINE_CHARACTERS_MAX:
            return encode()
        return await trio.to_thread.run_sync(
            encode, abandon_on_cancel=True, limiter=self._limiter
        )

    def encode_part(self, text: str, is_first: bool) -> list[int]:
        """The ids of text that stands between control tokens, or at the very beginning."""
        if not text:
            return []
        tokenizer = self._tokenizer if is_first else self._inner
        # Of the package's methods this is the one that releases the interpreter's lock.
        encodings = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encodings[0].ids

    def token_text(self, token_id: int | None) -> str:
        """How the vocabulary writes a token; empty for None and for an unknown id."""
        return "" if token_id is None else self._tokenizer.id_to_token(token_id) or ""

    def text_stream(
        self, stops: Sequence[str] = (), stop_ids: Sequence[int] = ()
    ) -> TextStream:
        """The text of one new stream. Raises `ValueError` for an empty stop string."""
        return TextStream(self._detokeniser, stops, {*self.card.eos_ids, *stop_ids})

    def end_token_text(self) -> str:
        """How the vocabulary writes the first end token; empty if there is none."""
        return self.token_text(self.card.eos_ids[0] if self.card.eos_ids else None)


def _load(tokenizer_json: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # Control tokens in text are text.
    return tokenizer


def _without_first_prefix(tokenizer_json: bytes) -> bytes | None:
    """The same tokenizer for text that is not at the beginning, or None if that is no other.

    Some put a space in front of the first piece of a text only. A part of a chat prompt is
    encoded by itself, but is no first piece.
    """
    if b'"first"' not in tokenizer_json:
        return None

    def patch(part: dict[str, Any] | None) -> bool:
        if part is None:
            return False
        if part.get("type") == "Sequence":
            return any(patch(inner) for inner in part["pretokenizers"])
        if part.get("prepend_scheme") != "first":
            return False
        part["prepend_scheme"] = "never"
        return True

    whole = msgspec.json.decode(tokenizer_json, type=dict[str, Any])
    return msgspec.json.encode(whole) if patch(whole.get("pre_tokenizer")) else None
