"""Reads the small files of a checkpoint, such as config.json."""

from pathlib import Path
from typing import TypeVar

import msgspec

from tidegate.engine.checkpoint.errors import CheckpointError

FILE_BYTES_MAX = 256 * 1024 * 1024  # The largest, tokenizer.json, is tens of megabytes.

T = TypeVar("T")


def read_json(path: Path, kind: type[T]) -> T:
    """The file's content as a `kind`. Raises `CheckpointError` if it cannot be read as one."""
    try:
        return msgspec.json.decode(read_bytes(path), type=kind)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_bytes(path: Path) -> bytes:
    """The file's content. Raises `CheckpointError` if it cannot be read or is too large."""
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise CheckpointError(f"{path}: has {size} bytes, more than {FILE_BYTES_MAX}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """The file's content as UTF-8. Raises `CheckpointError` as `read_bytes` does."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8: {error}") from None
