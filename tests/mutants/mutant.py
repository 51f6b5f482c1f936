"""A planted bug: a copy of the package is patched, and something must find that.

What finds it is either the simulator, on a few seeds, or tests of the part that has the bug.
The latter are for bugs on which the simulator's own pages agree with the core, since both ask
the same patched function.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec

import tidegate

PACKAGE = Path(tidegate.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
PARTS = ("kvcache", "ipc", "scheduler")  # What the core and the simulator consist of.
SEED_COUNT = 150
FAILED_SEED = re.compile(r"^(seed \d+) failed: (.*)$", re.MULTILINE)
FAILED_TEST = re.compile(r"^FAILED (?:.*tests/)?(.+?)(?: - (.*))?$", re.MULTILINE)


class BySeed(msgspec.Struct, frozen=True):
    """The simulator finds it on one of the seeds from `first` on.

    `checks` says whether the core checks itself after each event, or it is the pages and the
    clients that tell.
    """

    first: int = 0
    checks: bool = True

    def command(self) -> list[str]:
        seeds = f"{self.first}:{self.first + SEED_COUNT}"
        command = [sys.executable, "-m", "simulation", "--stop", "--seeds", seeds]
        return command if self.checks else [*command, "--no-checks"]


class ByTest(msgspec.Struct, frozen=True):
    """A test finds it, or one of a file's tests: the path is that within `tests`."""

    path: str

    def command(self) -> list[str]:
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        options += [f"--rootdir={TESTS.parent}", f"--config-file={TESTS.parent}/pyproject.toml"]
        return [sys.executable, "-m", "pytest", *options, str(TESTS / self.path)]


class Mutant(msgspec.Struct, frozen=True):
    """One bug, told as what then happens: in `path`, `old` (there once) becomes `new`."""

    name: str
    path: str
    old: str
    new: str
    killer: BySeed | ByTest = BySeed()


class Verdict(msgspec.Struct, frozen=True):
    """`killed_by` is a seed or a test, and empty if nothing has found the bug."""

    mutant: Mutant
    killed_by: str
    message: str
    output: str
    seconds: float


def run_mutant(mutant: Mutant, folder: Path) -> Verdict:
    """Plant the bug in a copy of the package, in an empty folder, and look for it.

    Raises `AssertionError` if the source has changed so that it cannot be planted.
    """
    package = folder / "tidegate"
    for part in PARTS:
        shutil.copytree(PACKAGE / part, package / part)
    shutil.copy(PACKAGE / "__init__.py", package)
    path = package / mutant.path
    source = path.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.path} has changed: adapt {mutant.name!r}"
    path.write_text(source.replace(mutant.old, mutant.new))
    begin = time.monotonic()
    run = subprocess.run(
        mutant.killer.command(),
        cwd=folder,  # Where Hypothesis keeps what it has found.
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{TESTS}", "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    pattern = FAILED_SEED if isinstance(mutant.killer, BySeed) else FAILED_TEST
    found = pattern.search(run.stdout) if run.returncode == 1 else None
    killed_by, message = ("", "") if found is None else found.groups(default="")
    output = run.stdout + run.stderr
    return Verdict(mutant, killed_by, message, output, time.monotonic() - begin)
