"""A model in a Hugging Face folder: config.json, tokenizer.json and safetensors files."""

from functools import cached_property
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.config_from_hf import config_from_hf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.fingerprint import file_fingerprint
from tidegate.engine.checkpoint.small_file import read_bytes, read_json, read_text

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that matter."""

    add_bos_token: bool | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _Index(msgspec.Struct):
    """The index of weights that are split over several files."""

    weight_map: dict[str, str]


class HfCheckpoint:
    """Each property is read from the folder when it is first asked for, and then kept.

    All of them raise `CheckpointError` if the folder does not hold what they need.
    """

    def __init__(self, path: Path, name: str, chat_template_override: str | None) -> None:
        self.path = path
        self.name = name
        self._chat_template_override = chat_template_override

    @cached_property
    def config(self) -> ModelConfig:
        return config_from_hf(self.path, self.name)

    @cached_property
    def tokenizer_json(self) -> bytes:
        """The content of tokenizer.json, whose post-processor may add special tokens."""
        return read_bytes(self.path / "tokenizer.json")

    @cached_property
    def chat_template(self) -> str | None:
        if self._chat_template_override is not None:
            return self._chat_template_override
        template_path = self.path / "chat_template.jinja"
        if template_path.exists():
            return read_text(template_path)
        template = self._tokenizer_config.chat_template
        if isinstance(template, list):
            return next((entry.template for entry in template if entry.name == "default"), None)
        return template

    @cached_property
    def add_bos(self) -> bool:
        """Whether a prompt that is plain text begins with the begin-of-sequence token."""
        if self._tokenizer_config.add_bos_token is not None:
            return self._tokenizer_config.add_bos_token
        try:
            tokenizer = Tokenizer.from_buffer(self.tokenizer_json)
        except Exception as error:  # The package raises plain Exception, whatever is wrong.
            raise CheckpointError(f"{self.path / 'tokenizer.json'}: {error}") from None
        ids = tokenizer.encode("a", add_special_tokens=True).ids
        return ids[:1] == [self.config.bos_id]

    @cached_property
    def weight_files(self) -> list[Path]:
        """The safetensors files that hold the weights, in order of name."""
        index_path = self.path / INDEX_FILE
        if not index_path.exists():
            return [self.path / SINGLE_FILE]
        names = sorted(set(read_json(index_path, _Index).weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{index_path}: {name!r} is not the name of a file here")
        return [self.path / name for name in names]

    @property
    def has_weights(self) -> bool:
        """Whether there are weights, beside the configuration."""
        return any((self.path / name).exists() for name in (SINGLE_FILE, INDEX_FILE))

    @property
    def notes(self) -> tuple[str, ...]:
        """What an operator should know of how the folder is read: nothing out of the way."""
        return ()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the configuration and the tokenizer, and of a sample of the weights."""
        described = [self.path / "config.json", self.path / "tokenizer.json"]
        return file_fingerprint(
            [(path, None) for path in described] + [(path, 0) for path in self.weight_files]
        )

    @cached_property
    def _tokenizer_config(self) -> _TokenizerConfig:
        path = self.path / "tokenizer_config.json"
        return read_json(path, _TokenizerConfig) if path.exists() else _TokenizerConfig()
