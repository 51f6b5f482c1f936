"""A model in a GGUF file."""

from functools import cached_property
from pathlib import Path

from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.config_from_gguf import config_from_gguf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.fingerprint import file_fingerprint
from tidegate.engine.checkpoint.gguf_header import GgufHeader
from tidegate.engine.checkpoint.gguf_reader import read_gguf_header
from tidegate.engine.checkpoint.tokenizer_from_gguf import (
    LLAMA3_NAMES,
    tokenizer_json_from_gguf,
)

# Their architecture is "llama", which has no window.
MISTRAL_NOTE = (
    "GGUF files of Mistral's models do not tell of a window: all layers attend to all positions"
)


class GgufCheckpoint:
    """Each property is read from the file when it is first asked for, and then kept.

    All of them raise `CheckpointError` if the file does not hold what they need.
    """

    def __init__(self, path: Path, name: str, chat_template_override: str | None) -> None:
        self.path = path
        self.name = name
        self._chat_template_override = chat_template_override

    @cached_property
    def header(self) -> GgufHeader:
        header = read_gguf_header(self.path)
        if header.integer("split.count", 1) > 1:
            raise CheckpointError(
                f"{self.path}: field split.count is {header.integer('split.count')}: models "
                "split over several files are not supported; merge them first"
            )
        return header

    @cached_property
    def config(self) -> ModelConfig:
        return config_from_gguf(self.header, self.name, is_chat=self.chat_template is not None)

    @cached_property
    def tokenizer_json(self) -> bytes:
        """A tokenizer.json made from the vocabulary; it adds no begin-of-sequence token."""
        return tokenizer_json_from_gguf(self.header)

    @property
    def chat_template(self) -> str | None:
        if self._chat_template_override is not None:
            return self._chat_template_override
        return self.header.text("tokenizer.chat_template", "") or None

    @property
    def add_bos(self) -> bool:
        """Whether a prompt that is plain text begins with the begin-of-sequence token."""
        # Where the file does not say, the kinds of tokenizer that have always added it do.
        default = (
            self.header.text("tokenizer.ggml.model") == "llama"
            or self.header.text("tokenizer.ggml.pre", "") in LLAMA3_NAMES
        )
        return self.header.boolean("tokenizer.ggml.add_bos_token", default)

    @property
    def has_weights(self) -> bool:
        """Such a file always holds them."""
        return True

    @property
    def notes(self) -> tuple[str, ...]:
        """What an operator should know of how the file is read."""
        header = self.header
        names = (header.text(key, "") for key in ("general.name", "general.basename"))
        is_mistral = any("mistral" in name.lower() for name in names)
        if header.text("general.architecture") == "llama" and is_mistral:
            return (MISTRAL_NOTE,)
        return ()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the configuration and the vocabulary, and of a sample of the weights."""
        return file_fingerprint([(self.path, self.header.header_bytes)])
