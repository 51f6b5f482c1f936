"""Tokenizers made of GGUF vocabularies, against SentencePiece and transformers."""

import json
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from oracle import make_gemma_tokens
from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from oracle.make_tiny_gguf import make_tiny_gguf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.gguf_header import FieldValue, GgufHeader
from tidegate.engine.checkpoint.gguf_reader import read_gguf_header
from tidegate.engine.checkpoint.packaged_models import locate_gemma3_270m, locate_smollm2_135m
from tidegate.engine.checkpoint.tokenizer_from_gguf import tokenizer_json_from_gguf

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def tokenizer_of(header: GgufHeader) -> Tokenizer:
    """The tokenizer, reading users' text: control tokens in it are plain text."""
    tokenizer = Tokenizer.from_buffer(tokenizer_json_from_gguf(header))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    return tokenizer_of(read_gguf_header(locate_gemma3_270m()))


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return tokenizer_of(read_gguf_header(locate_smollm2_135m()))


def gemma_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(make_gemma_tokens.OUTPUT.read_text())
    return rows


# SentencePiece's mark for a space stands for a space in text too, so it does not come back.
plain_text = st.text(max_size=60).filter(lambda text: "\u2581" not in text)

# Bytes that occur in UTF-8 and are no token of SmolLM2's: it reads over them.
SMOLLM_LACKS = set(bytes.fromhex("040613 14161d f1f2"))


def smollm_knows(text: str) -> bool:
    return SMOLLM_LACKS.isdisjoint(text.encode())


def test_gemma_encodes_as_sentencepiece_does(gemma: Tokenizer) -> None:
    rows = gemma_rows()
    assert len(rows) > 150
    for row in rows:
        assert gemma.encode(row["text"]).ids == row["ids"], row["text"]


@settings(max_examples=300)
@given(text=plain_text)
def test_gemma_gives_any_text_back(gemma: Tokenizer, text: str) -> None:
    ids = gemma.encode(text).ids
    assert gemma.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=300)
@given(text=st.text(max_size=60).filter(smollm_knows))
def test_smollm_gives_any_text_back_of_bytes_that_it_knows(
    smollm: Tokenizer, text: str
) -> None:
    ids = smollm.encode(text).ids
    assert smollm.decode(ids, skip_special_tokens=False) == text


def test_smollm_encodes_as_transformers_does_where_there_are_no_digits(
    smollm: Tokenizer,
) -> None:
    # transformers' conversion loses the splitting of digits, so it is no oracle for those.
    path = locate_smollm2_135m()
    oracle = cast("Any", AutoTokenizer).from_pretrained(path.parent, gguf_file=path.name)
    for row in gemma_rows():
        text = "".join(letter for letter in row["text"] if not letter.isnumeric())
        # Unlike ours, the oracle reads control tokens in any text.
        text = text.replace("<|", "")
        expected: list[int] = oracle.encode(text, add_special_tokens=False)
        assert smollm.encode(text).ids == expected, text


def test_smollm_makes_a_token_of_each_digit(smollm: Tokenizer) -> None:
    for text in ("2024", "a1b22", "3.14159", "x = 1000000"):
        tokens = smollm.encode(text).tokens
        digits = [token for token in tokens if any(letter.isdigit() for letter in token)]
        assert digits == [letter for letter in text if letter.isdigit()]
    # Digits are split off first, so the spaces before them stay together.
    assert smollm.encode("x  12").tokens == ["x", "\u0120\u0120", "1", "2"]


def test_neither_adds_a_token_of_its_own(gemma: Tokenizer, smollm: Tokenizer) -> None:
    for tokenizer in (gemma, smollm):
        assert tokenizer.encode("", add_special_tokens=True).ids == []
        with_special = tokenizer.encode("tide", add_special_tokens=True).ids
        assert with_special == tokenizer.encode("tide", add_special_tokens=False).ids


def test_control_tokens_are_read_as_such_only_when_asked(
    gemma: Tokenizer, smollm: Tokenizer
) -> None:
    for tokenizer, text, token_id in (
        (gemma, "<end_of_turn>", 106),
        (smollm, "<|im_end|>", 2),
    ):
        assert token_id not in tokenizer.encode(text).ids
        tokenizer.encode_special_tokens = False
        assert tokenizer.encode(text).ids == [token_id]
        tokenizer.encode_special_tokens = True
        assert tokenizer.decode([token_id], skip_special_tokens=True) == ""


def test_ids_are_the_file_s(gemma: Tokenizer, smollm: Tokenizer) -> None:
    for tokenizer, path in ((gemma, locate_gemma3_270m()), (smollm, locate_smollm2_135m())):
        texts = read_gguf_header(path).texts("tokenizer.ggml.tokens")
        assert tokenizer.get_vocab_size() == len(texts)
        for token_id in range(0, len(texts), 97):
            assert tokenizer.id_to_token(token_id) == texts[token_id]


def test_a_byte_level_vocabulary_encodes_as_the_tokenizer_it_came_from(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    header = read_gguf_header(make_tiny_gguf(tmp_path / "tiny.gguf", folder))
    tokenizer = tokenizer_of(header)
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for row in gemma_rows():
        assert tokenizer.encode(row["text"]).ids == original.encode(row["text"]).ids


def test_llama_3_splits_numbers_by_three_and_keeps_whole_words(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    fields: dict[str, int | float | bool | str | None] = {"tokenizer.ggml.pre": "llama-bpe"}
    header = read_gguf_header(make_tiny_gguf(tmp_path / "tiny.gguf", folder, fields=fields))
    made = json.loads(tokenizer_json_from_gguf(header))
    assert made["model"]["ignore_merges"]
    tokenizer = tokenizer_of(header)
    words = [text for text, _ in pre_tokenized(tokenizer, "It's 12345 boats!\n\n  Go")]
    assert words == ["It", "'s", "Ġ", "123", "45", "Ġboats", "!ĊĊ", "Ġ", "ĠGo"]


def test_smollm3_splits_as_llama_3_does(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    path = make_tiny_gguf(
        tmp_path / "tiny.gguf", folder, fields={"tokenizer.ggml.pre": "smaug-bpe"}
    )
    words = [text for text, _ in pre_tokenized(tokenizer_of(read_gguf_header(path)), "a 1234")]
    assert words == ["a", "Ġ", "123", "4"]


def test_qwen_2_makes_a_token_of_each_digit_and_composes_letters(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    fields: dict[str, int | float | bool | str | None] = {"tokenizer.ggml.pre": "qwen2"}
    path = make_tiny_gguf(tmp_path / "tiny.gguf", folder, fields=fields)
    tokenizer = tokenizer_of(read_gguf_header(path))
    words = [text for text, _ in pre_tokenized(tokenizer, "It's 12 boats!\n\n  Go")]
    assert words == ["It", "'s", "Ġ", "1", "2", "Ġboats", "!ĊĊ", "Ġ", "ĠGo"]
    assert tokenizer.decode(tokenizer.encode("mare\u0301e").ids) == "mar\u00e9e"
    # The same vocabulary in transformers' own tokenizer of these models.
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges: Any = [tuple(pair) for pair in vocabulary["merges"]]
    oracle: Any = Qwen2Tokenizer(vocab=vocabulary["vocab"], merges=merges)
    for row in gemma_rows():
        expected: list[int] = oracle.encode(row["text"], add_special_tokens=False)
        assert tokenizer.encode(row["text"]).ids == expected, row["text"]


def pre_tokenized(tokenizer: Tokenizer, text: str) -> list[tuple[str, tuple[int, int]]]:
    step = tokenizer.pre_tokenizer
    assert step is not None
    pieces: list[tuple[str, tuple[int, int]]] = step.pre_tokenize_str(text)
    return pieces


def sentencepiece_header(**fields: FieldValue) -> GgufHeader:
    """A vocabulary in which "tide" is made of "ti" and "de" first, and then of both."""
    pieces = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0)]
    pieces += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    pieces += [
        (text, NORMAL, -float(place))
        for place, text in enumerate(["ti", "de", "id", "tide", "\u2581tide", "\u2581"])
    ]
    pieces += [(letter, NORMAL, -100.0) for letter in "tide"]
    texts, kinds, scores = zip(*pieces, strict=True)
    own: dict[str, FieldValue] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    merged = own | {key.replace("__", "."): value for key, value in fields.items()}
    return GgufHeader(Path("made.gguf"), merged, {}, header_bytes=0, file_bytes=0)


def test_merges_follow_scores_and_unknown_letters_fall_back_to_bytes() -> None:
    header = sentencepiece_header(tokenizer__ggml__add_space_prefix=False)
    tokenizer = tokenizer_of(header)
    assert tokenizer.encode("tide").tokens == ["tide"]
    assert tokenizer.encode("id").tokens == ["id"]
    assert tokenizer.encode("tid").tokens == ["ti", "d"]
    assert tokenizer.encode("t\u00e9").tokens == ["t", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("t\u00e9 tide").ids) == "t\u00e9 tide"


def test_a_space_goes_before_the_text_unless_the_file_says_otherwise() -> None:
    tokenizer = tokenizer_of(sentencepiece_header())
    assert tokenizer.encode("tide").tokens == ["\u2581tide"]
    assert tokenizer.decode(tokenizer.encode("tide tide").ids) == "tide tide"
    assert tokenizer.decode(tokenizer.encode(" tide").ids) == " tide"


def test_gemma_4_takes_the_merges_that_its_file_lists() -> None:
    # A tokenizer of the kind that is published: spaces become marks, letters that are no token
    # bytes, and words are not split before.
    original = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    original.encode_special_tokens = True
    original.normalizer = normalizers.Replace(" ", "\u2581")
    bytes_of_text = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>"],
        initial_alphabet=[],
        limit_alphabet=60,
        max_token_length=8,
        show_progress=False,
    )
    original.train_from_iterator((row["text"] for row in gemma_rows()), trainer)
    made: dict[str, Any] = json.loads(original.to_str())["model"]
    learnt = sorted(made["vocab"], key=made["vocab"].__getitem__)
    texts = [*learnt, *bytes_of_text]
    vocabulary = {text: number for number, text in enumerate(texts)}
    merges = [(left, right) for left, right in made["merges"]]
    original.model = models.BPE(
        vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    kinds = [CONTROL] * 3 + [UNKNOWN] + [NORMAL] * (len(learnt) - 4) + [BYTE] * 256
    header = sentencepiece_header(
        tokenizer__ggml__model="gemma4",
        tokenizer__ggml__tokens=tuple(texts),
        tokenizer__ggml__token_type=tuple(kinds),
        tokenizer__ggml__merges=tuple(f"{left} {right}" for left, right in merges),
        tokenizer__ggml__unknown_token_id=3,
        tokenizer__ggml__add_space_prefix=False,
    )
    tokenizer = tokenizer_of(header)
    assert any(len(row) > 3 for row in tokenizer.encode("One, two, three").tokens)
    for row in gemma_rows():
        ids = tokenizer.encode(row["text"]).ids
        assert ids == original.encode(row["text"]).ids, row["text"]
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded == row["text"].replace("\u2581", " ")
    spoilt = msgspec.structs.replace(
        header, fields=header.fields | {"tokenizer.ggml.merges": ("x yzzy",)}
    )
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges has"):
        tokenizer_json_from_gguf(spoilt)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model", "t5", "tokenizer.ggml.model is t5: supported are llama"),
        ("scores", (0.0,), "tokenizer.ggml.scores has 1 entries"),
        ("token_type", (1,), "tokenizer.ggml.token_type has 1 entries"),
        ("unknown_token_id", 10**6, "tokenizer.ggml.unknown_token_id is 1000000"),
        ("tokens", ("a", "a"), "tokenizer.ggml.t"),
    ],
)
def test_metadata_that_do_not_fit_together_are_refused_and_named(
    field: str, value: FieldValue, named: str
) -> None:
    header = sentencepiece_header(**{f"tokenizer__ggml__{field}": value})
    with pytest.raises(CheckpointError) as caught:
        tokenizer_json_from_gguf(header)
    assert f"made.gguf: field {named}" in str(caught.value)


def test_a_token_named_twice_is_refused() -> None:
    header = sentencepiece_header()
    texts = header.fields["tokenizer.ggml.tokens"]
    assert isinstance(texts, tuple)
    twice = msgspec.structs.replace(
        header, fields=header.fields | {"tokenizer.ggml.tokens": (*texts[:-1], texts[0])}
    )
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens has a token twice"):
        tokenizer_json_from_gguf(twice)


def test_byte_level_metadata_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    header = read_gguf_header(make_tiny_gguf(tmp_path / "tiny.gguf", folder))
    for line in ("t zz", "tide", ""):
        spoilt = msgspec.structs.replace(
            header, fields=header.fields | {"tokenizer.ggml.merges": (line,)}
        )
        with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges has"):
            tokenizer_json_from_gguf(spoilt)
    other = msgspec.structs.replace(
        header, fields=header.fields | {"tokenizer.ggml.pre": "dbrx"}
    )
    with pytest.raises(CheckpointError, match=r"pre is dbrx: supported are gpt-2, smollm"):
        tokenizer_json_from_gguf(other)
