"""Tells checkpoints apart without reading all of their weights."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tidegate.engine.checkpoint.errors import CheckpointError

SAMPLE_COUNT = 16
SAMPLE_BYTES = 4096


def file_fingerprint(files: Iterable[tuple[Path, int | None]]) -> str:
    """A SHA-256 in hex over the files, in order: (path, bytes at its start that all count).

    Of what follows those bytes (None: of nothing, as all bytes count), the size and samples at
    even distances count. So two models of the same shape with other weights differ, and a file
    of any size takes milliseconds. Paths and names do not count.

    Raises `CheckpointError` for a file that cannot be read.
    """
    digest = hashlib.sha256()
    for path, leading_bytes in files:
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                leading = size if leading_bytes is None else min(leading_bytes, size)
                digest.update(f"{size},{leading};".encode())
                digest.update(file.read(leading))
                for sample in range(SAMPLE_COUNT if leading < size else 0):
                    file.seek(leading + (size - leading) * sample // SAMPLE_COUNT)
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()
