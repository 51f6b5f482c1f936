"""Reading the small files of a checkpoint."""

from pathlib import Path

import pytest

from tidegate.engine.checkpoint import small_file
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.small_file import read_bytes


def test_a_file_above_the_bound_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_file, "FILE_BYTES_MAX", 10)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(bytes(10))
    assert read_bytes(path) == bytes(10)
    path.write_bytes(bytes(11))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has 11 bytes, more than 10"):
        read_bytes(path)
