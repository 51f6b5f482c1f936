"""Writes gemma_tokens.json: strings, and what SentencePiece makes of them with Gemma's pieces.

Run by hand, where the packages `sentencepiece` and `protobuf` are installed beside this one:

    python tests/oracle/make_gemma_tokens.py
"""

import importlib
import json
import random
from pathlib import Path
from typing import Any

from tidegate.engine.checkpoint.gguf_checkpoint import GgufCheckpoint
from tidegate.engine.checkpoint.packaged_models import locate_gemma3_270m

OUTPUT = Path(__file__).with_name("gemma_tokens.json")
RANDOM_STRING_COUNT = 150
SPACE_MARK = "\u2581"
USER_DEFINED, UNKNOWN = 4, 2

BY_HAND = [
    "",
    " ",
    "  ",
    " a",
    "a ",
    "\n",
    "\n\n\n",
    "   leading",
    "trailing   ",
    "The capital of France is",
    "def f(x):\n    return x + 1\n\n\nprint(f(41))\t# 42",
    "<b>bold</b> <table><tr><td>1</td></tr></table>",
    "<bos> <end_of_turn> <unused5> [multimodal]",
    "0123456789" * 4,
    "a" * 200,
    " " * 40,
    "\t" * 40,
    "\x00\x01\x7f\ufeff\ufffd\U0010ffff",
]
WORDS = """
the tide gate harbour naïve café Straße don't we'll fooBar snake_case HTTPServer __init__
3.14159 2024-05-06 https://example.org/a?b=c&d=e <i> </i> <eos> № ½ ™ … — ﬁ İ \U0001d539 𐍈 ᐛ
日本語のテキスト 漢字 한국어 Привет мир مرحبا שלום हिन्दी ไทย 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 a\u200bb
"""
GAPS = [
    " ",
    " ",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\t",
    "",
    ".",
    ", ",
    "! ",
    " (",
    "-",
    "\r\n",
    "\u3000",
    "\u00a0",
]


def main() -> None:
    checkpoint = GgufCheckpoint(locate_gemma3_270m(), "gemma3-270m", None)
    processor = _sentencepiece(checkpoint)
    rows = [{"text": text, "ids": processor.encode(text)} for text in BY_HAND + _random()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    OUTPUT.write_text(f"[\n{lines}\n]\n")


def _random() -> list[str]:
    rng = random.Random(0)
    words = WORDS.split()
    texts: list[str] = []
    for _ in range(RANDOM_STRING_COUNT):
        parts: list[str] = []
        for _ in range(rng.randint(1, 12)):
            letter = chr(rng.choice([rng.randint(32, 0x24FF), rng.randint(0x3000, 0xD7FF)]))
            number = str(rng.randint(0, 10 ** rng.randint(1, 12)))
            parts += [rng.choice([rng.choice(words), rng.choice(words), letter, number])]
            parts += [rng.choice(GAPS)]
        texts.append("".join(parts))
    return texts


def _sentencepiece(checkpoint: GgufCheckpoint) -> Any:
    # Loaded by name, as neither package is a dependency of the project.
    proto = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    header = checkpoint.header
    texts = header.texts("tokenizer.ggml.tokens")
    scores = header.numbers("tokenizer.ggml.scores")
    kinds = header.integers("tokenizer.ggml.token_type")
    for text, score, kind in zip(texts, scores, kinds, strict=True):
        piece = proto.pieces.add()
        piece.piece = text.replace(" ", SPACE_MARK) if kind == USER_DEFINED else text
        piece.score = score
        piece.type = UNKNOWN if text == "<unk>" else kind
    proto.trainer_spec.model_type = 2  # BPE.
    proto.trainer_spec.byte_fallback = True
    for name in ("unk", "bos", "eos", "pad"):
        setattr(proto.trainer_spec, f"{name}_id", texts.index(f"<{name}>"))
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    processor = importlib.import_module("sentencepiece").SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto.SerializeToString())
    return processor


if __name__ == "__main__":
    main()
