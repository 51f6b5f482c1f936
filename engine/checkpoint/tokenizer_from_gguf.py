"""Makes a tokenizer.json, as the `tokenizers` package reads it, from a GGUF file's vocabulary.

The tokenizer that comes out adds no token of its own: who encodes a prompt prepends the
begin-of-sequence token if the model wants one.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.gguf_header import GgufHeader

KIND_NORMAL = 1
KIND_UNKNOWN = 2
KIND_CONTROL = 3
KIND_USER_DEFINED = 4
KIND_BYTE = 6

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this.

# The splitting of Llama 3: contractions, words, numbers of up to three digits, punctuation.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# That of Qwen 2 is the same, but that each digit stands alone.
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

LLAMA3_NAMES = ("llama-bpe", "llama-v3", "llama3")

Json = dict[str, Any]


class _Vocabulary(msgspec.Struct, frozen=True):
    """The tokens by id, and what kind each of them is."""

    texts: list[str]
    kinds: list[int]
    ids: dict[str, int]


def tokenizer_json_from_gguf(header: GgufHeader) -> bytes:
    """The bytes of a tokenizer.json that encodes and decodes as the file's metadata says.

    Raises `CheckpointError` for a kind of tokenizer that is not supported and for metadata that
    do not fit together. Takes about 1 s for a vocabulary of 262,144 tokens.
    """
    vocabulary = _vocabulary(header)
    model = header.text("tokenizer.ggml.model")
    if model == "llama":
        parts = _sentencepiece(header, vocabulary, _merges_of_scores(header, vocabulary))
    elif model == "gemma4":
        parts = _sentencepiece(header, vocabulary, _merges(header, vocabulary))
    elif model == "gpt2":
        parts = _byte_level(header, vocabulary)
    else:
        raise CheckpointError(
            f"{header.path}: field tokenizer.ggml.model is {model}: supported are llama and "
            "gemma4 (SentencePiece BPE) and gpt2 (byte-level BPE)"
        )
    tokenizer: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(vocabulary)),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
    }
    return msgspec.json.encode(tokenizer | parts)


def _vocabulary(header: GgufHeader) -> _Vocabulary:
    texts = header.texts("tokenizer.ggml.tokens")
    kinds = header.integers("tokenizer.ggml.token_type")
    ids = {text: token_id for token_id, text in enumerate(texts)}
    if len(kinds) != len(texts):
        raise CheckpointError(
            f"{header.path}: field tokenizer.ggml.token_type has {len(kinds)} entries: must "
            f"have one for each of the {len(texts)} tokens"
        )
    if len(ids) != len(texts):
        raise CheckpointError(f"{header.path}: field tokenizer.ggml.tokens has a token twice")
    return _Vocabulary(texts, kinds, ids)


def _added_tokens(vocabulary: _Vocabulary) -> Iterator[Json]:
    """Control tokens, which count as special, and user-defined ones, which are plain text."""
    for token_id, (text, kind) in enumerate(
        zip(vocabulary.texts, vocabulary.kinds, strict=True)
    ):
        if kind in (KIND_CONTROL, KIND_USER_DEFINED, KIND_UNKNOWN):
            yield {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != KIND_USER_DEFINED,
            }


# --- SentencePiece BPE ---


def _sentencepiece(
    header: GgufHeader, vocabulary: _Vocabulary, merges: list[tuple[str, str]]
) -> Json:
    normalizers: list[Json] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    ]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    # SentencePiece puts a space before the text, unless the file says otherwise.
    if header.boolean("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE_MARK})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown_id = header.integer("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown_id < len(vocabulary.texts):
        raise CheckpointError(
            f"{header.path}: field tokenizer.ggml.unknown_token_id is {unknown_id}: must be a "
            f"token id from 0 to {len(vocabulary.texts) - 1}"
        )
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            merges=merges,
            unknown=vocabulary.texts[unknown_id],
            byte_fallback=KIND_BYTE in vocabulary.kinds,
        ),
    }


def _merges_of_scores(header: GgufHeader, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the best-scored result first."""
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.texts):
        raise CheckpointError(
            f"{header.path}: field tokenizer.ggml.scores has {len(scores)} entries: must have "
            f"one for each of the {len(vocabulary.texts)} tokens"
        )
    # Only normal tokens take part: the others are found whole in the text, or never.
    mergeable = {
        text: score
        for text, kind, score in zip(vocabulary.texts, vocabulary.kinds, scores, strict=True)
        if kind == KIND_NORMAL
    }
    merges: list[tuple[str, str]] = []
    for text in sorted(mergeable, key=mergeable.__getitem__, reverse=True):
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in mergeable and right in mergeable:
                merges.append((left, right))
    return merges


# --- Byte-level BPE ---


def _merges(header: GgufHeader, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Those that the file lists, the first one first."""
    merges: list[tuple[str, str]] = []
    for line in header.texts("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary.ids.keys():
            raise CheckpointError(
                f"{header.path}: field tokenizer.ggml.merges has {line!r}: both parts and the "
                "whole must be tokens"
            )
        merges.append((left, right))
    return merges


def _byte_level(header: GgufHeader, vocabulary: _Vocabulary) -> Json:
    name = header.text("tokenizer.ggml.pre", "gpt-2")
    pre_tokenizers = _PRE_TOKENIZERS.get(name)
    if pre_tokenizers is None:
        raise CheckpointError(
            f"{header.path}: field tokenizer.ggml.pre is {name}: supported are "
            f"{', '.join(_PRE_TOKENIZERS)}"
        )
    model = _bpe(
        vocabulary, merges=_merges(header, vocabulary), unknown=None, byte_fallback=False
    )
    # Llama 3 takes a word that is a token as that token, whatever the merges would give.
    model["ignore_merges"] = name in LLAMA3_NAMES
    return {
        # Qwen composes letters with their accents first.
        "normalizer": {"type": "NFC"} if name == QWEN2_NAME else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers},
        "decoder": _byte_level_step(use_regex=True),
        "model": model,
    }


def _byte_level_step(use_regex: bool) -> Json:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> list[Json]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _byte_level_step(use_regex=False)]


QWEN2_NAME = "qwen2"
_PRE_TOKENIZERS: dict[str, list[Json]] = {
    "gpt-2": [_byte_level_step(use_regex=True)],
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        _byte_level_step(use_regex=True),
    ],
    QWEN2_NAME: _split(QWEN2_PATTERN),
    "smaug-bpe": _split(LLAMA3_PATTERN),  # As SmolLM3's files call it.
} | dict.fromkeys(LLAMA3_NAMES, _split(LLAMA3_PATTERN))


def _bpe(
    vocabulary: _Vocabulary,
    merges: list[tuple[str, str]],
    unknown: str | None,
    byte_fallback: bool,
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
        "merges": merges,
    }
