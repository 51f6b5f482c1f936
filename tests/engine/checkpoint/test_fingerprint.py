"""Fingerprints: the same for the same model, another for another one."""

import shutil
from pathlib import Path

import pytest

from oracle.make_tiny_checkpoint import make_tiny_checkpoint
from oracle.make_tiny_gguf import make_tiny_gguf
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.fingerprint import SAMPLE_BYTES, file_fingerprint
from tidegate.engine.checkpoint.registry import open_checkpoint


def fingerprint(path: Path) -> str:
    return open_checkpoint(str(path)).fingerprint


def test_a_copy_under_another_name_has_the_same_fingerprint(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "one", "gemma3")
    shutil.copytree(folder, tmp_path / "two")
    assert fingerprint(folder) == fingerprint(tmp_path / "two")
    path = make_tiny_gguf(tmp_path / "one.gguf", folder)
    shutil.copy(path, tmp_path / "two.gguf")
    assert fingerprint(path) == fingerprint(tmp_path / "two.gguf")


def test_other_weights_sizes_and_tokenizers_have_other_fingerprints(tmp_path: Path) -> None:
    folders = [
        make_tiny_checkpoint(tmp_path / "base", "gemma3"),
        make_tiny_checkpoint(tmp_path / "weights", "gemma3", seed=1),
        make_tiny_checkpoint(tmp_path / "window", "gemma3", sliding_window=16),
        make_tiny_checkpoint(tmp_path / "family", "llama"),
        make_tiny_checkpoint(tmp_path / "tokenizer", "gemma3"),
    ]
    tokenizer_path = folders[-1] / "tokenizer.json"
    tokenizer_path.write_text(tokenizer_path.read_text() + " ")
    paths = [
        make_tiny_gguf(
            folder.with_suffix(".gguf"), folder, fields={"general.name": folder.name}
        )
        for folder in folders
    ]
    found = [fingerprint(path) for path in folders + paths]
    assert len(set(found)) == len(found)


def test_the_chat_template_is_no_part_of_a_fingerprint(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    assert open_checkpoint(str(folder), template).fingerprint == fingerprint(folder)


def test_all_leading_bytes_count_and_samples_of_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = bytearray(1_000_000)
    seen: set[str] = set()
    for change in (None, 0, 999, 1000, 1000 + SAMPLE_BYTES - 1):
        if change is not None:
            content[change] += 1
        path.write_bytes(content)
        seen.add(file_fingerprint([(path, 1000)]))
    assert len(seen) == 5
    path.write_bytes(content + b"\0")
    assert file_fingerprint([(path, 1000)]) not in seen


def test_with_no_number_given_every_byte_counts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = bytearray(100_000)
    seen: set[str] = set()
    for change in range(0, len(content), 9_999):
        content[change] = 1
        path.write_bytes(content)
        seen.add(file_fingerprint([(path, None)]))
    assert len(seen) == 11


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent: cannot be read: No such file"):
        file_fingerprint([(tmp_path / "absent", None)])
