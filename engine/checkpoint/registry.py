"""Finds the checkpoint that a MODEL argument means."""

from pathlib import Path

from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.gguf_checkpoint import GgufCheckpoint
from tidegate.engine.checkpoint.hf_checkpoint import INDEX_FILE, SINGLE_FILE, HfCheckpoint
from tidegate.engine.checkpoint.packaged_models import PACKAGED_MODELS
from tidegate.engine.checkpoint.small_file import read_text

Checkpoint = GgufCheckpoint | HfCheckpoint


def open_checkpoint(
    model: str, chat_template_path: str | Path | None = None, *, needs_weights: bool = True
) -> Checkpoint:
    """The checkpoint that `model` means: a packaged model's name, a GGUF file or a folder.

    A folder is one that Hugging Face's tools write, with config.json and safetensors files. The
    chat template in `chat_template_path` takes the place of the model's own. Little is read
    yet: the checkpoint's properties read what they need, when they are asked for. Without
    `needs_weights` a folder with config.json alone will do.

    Raises `CheckpointError` if `model` is none of these, is not installed, or if the template
    cannot be read or is empty.
    """
    override = None if chat_template_path is None else _read_template(Path(chat_template_path))
    for packaged in PACKAGED_MODELS:
        if model == packaged.name:
            return GgufCheckpoint(packaged.locate(), packaged.name, override)
    path = Path(model).expanduser()
    if path.is_dir():
        weights = ((SINGLE_FILE, INDEX_FILE),) if needs_weights else ()
        for names in (("config.json",), *weights):
            if not any((path / name).exists() for name in names):
                raise _not_accepted(f"folder {model} has no {' or '.join(names)}")
        return HfCheckpoint(path, path.resolve().name, override)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return GgufCheckpoint(path, path.stem, override)
    if path.exists():
        raise _not_accepted(f"{model} is neither a .gguf file nor a folder")
    raise _not_accepted(f"{model} is not a model's name, and no such file exists")


def _read_template(path: Path) -> str:
    template = read_text(path)
    if not template.strip():
        raise CheckpointError(f"{path}: the chat template is empty")
    return template


def _not_accepted(text: str) -> CheckpointError:
    names = ", ".join(packaged.name for packaged in PACKAGED_MODELS)
    return CheckpointError(
        f"{text}. A model is one of {names}; or the path of a .gguf file; or the path of a "
        "folder with config.json, tokenizer.json and safetensors files"
    )
