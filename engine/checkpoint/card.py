"""Makes the model card: what clients need to turn text into tokens and back."""

from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.registry import Checkpoint
from tidegate.ipc.protocol import ModelCard


def build_card(checkpoint: Checkpoint) -> ModelCard:
    """The card of `checkpoint`. Takes about 1 s for a GGUF file with a large vocabulary.

    Text is encoded without the tokenizer's own special tokens; if `add_bos` is true in the
    card, `bos_id` goes before the tokens of a prompt that is plain text. A chat template writes
    the begin-of-sequence token itself where the model wants one.

    Raises `CheckpointError` if the checkpoint does not hold what the card needs.
    """
    config = checkpoint.config
    if checkpoint.add_bos and config.bos_id is None:
        raise CheckpointError(
            f"{checkpoint.path}: prompts are to begin with a begin-of-sequence token, but none "
            "is named"
        )
    return ModelCard(
        name=config.name,
        family=config.family,
        vocab_size=config.vocab_size,
        context=config.context,
        tokenizer_json=checkpoint.tokenizer_json,
        chat_template=checkpoint.chat_template,
        bos_id=config.bos_id,
        add_bos=checkpoint.add_bos,
        eos_ids=config.eos_ids,
    )
