"""Small tokenizers of the kinds that real models have, trained on the spot."""

from functools import cache

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.decoders import Decoder
from tokenizers.normalizers import Normalizer
from tokenizers.trainers import BpeTrainer

START = "<|im_start|>"
END = "<|im_end|>"
BEGIN = "<s>"
CORPUS = [
    "the cat sat on the mat and the dog sat on the cat",
    "a stop string is text: it does not depend on where tokens end",
    "naïve café, crème brûlée; 你好 你好 한국어 한국어 ďábelské",
    "user\nassistant\nsystem\n\n\nuser\nassistant\nsystem\n",
    "0123456789 {} [] <> | _ , . ; : ! ? im_start im_end",
]


@cache
def byte_level() -> Tokenizer:
    """As SmolLM2, Llama 3 and Qwen have it; no begin token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[control("<|endoftext|>"), control(START), control(END)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    add(tokenizer, AddedToken("<think>"), AddedToken("日本"))
    return tokenizer


@cache
def sentencepiece(space_prefix: bool = False) -> Tokenizer:
    """As Gemma has it: byte fallback and "▁" for a space. Llama 2 also puts a space first."""
    mark: list[Normalizer] = [normalizers.Replace(" ", "▁")]
    undo: list[Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(mark)
    trainer = BpeTrainer(vocab_size=130, show_progress=False)
    trained.train_from_iterator([line for line in CORPUS if line.isascii()], trainer)
    vocabulary = trained.get_vocab()
    pieces = [BEGIN, "<eos>", "<unk>", START, END] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += sorted(vocabulary, key=vocabulary.__getitem__)
    merges: list[list[str]] = msgspec.json.decode(trained.to_str())["model"]["merges"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[(left, right) for left, right in merges],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    if space_prefix:
        mark = [normalizers.Prepend("▁"), *mark]
        undo = [*undo, decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(mark)
    tokenizer.decoder = decoders.Sequence(undo)
    add(tokenizer, *map(control, pieces[:5]), AddedToken("\n\n", normalized=False))
    return tokenizer


def control(content: str) -> AddedToken:
    return AddedToken(content, special=True, normalized=False)


def add(tokenizer: Tokenizer, *tokens: AddedToken) -> None:
    # The package's own type for this argument is a bare `list`.
    tokenizer.add_tokens(list(tokens))  # pyright: ignore[reportUnknownMemberType]


@cache
def first_metaspace() -> Tokenizer:
    """As newer Llama 2 files have it: a space in front of the first piece of a text only."""
    tokenizer = Tokenizer.from_str(sentencepiece(space_prefix=True).to_str())
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer
