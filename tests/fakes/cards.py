"""Model cards around the tiny tokenizers."""

import msgspec
from tokenizers import Tokenizer

from tidegate.ipc.protocol import ModelCard

CONTEXT = 256


def card_of(
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    bos_token: str | None = None,
    eos_tokens: tuple[str, ...] = (),
    name: str = "tiny",
    context: int = CONTEXT,
) -> ModelCard:
    """A card; a begin token is one that prompts begin with."""
    vocabulary = tokenizer.get_vocab()
    return ModelCard(
        name=name,
        family="llama",
        vocab_size=tokenizer.get_vocab_size(),
        context=context,
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=chat_template,
        bos_id=None if bos_token is None else vocabulary[bos_token],
        add_bos=bos_token is not None,
        eos_ids=tuple(vocabulary[token] for token in eos_tokens),
    )


def with_tokenizer(card: ModelCard, tokenizer_json: bytes) -> ModelCard:
    return msgspec.structs.replace(card, tokenizer_json=tokenizer_json)
