"""The text part of checkpoints that see or hear: which tensors it has, and which it has not."""

# Where transformers keeps the language model, first as it is now and then as it was.
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# What turns images and sounds into vectors. Only text is served.
_OTHER_PARTS = (
    "vision_tower.",
    "multi_modal_projector.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
)


def text_tensor_name(stored: str) -> str | None:
    """The name that the tensor has in a folder of the language model alone; None if it belongs
    to another part. A name that no rule knows stays as it is.
    """
    for prefix, canonical in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return canonical + stored.removeprefix(prefix)
    is_other = stored.removeprefix("model.").startswith(_OTHER_PARTS)
    return None if is_other else stored
