"""The private folder of a running server, in which its sockets are.

1. A server without `--run-dir` makes a fresh one, so that any number of servers may run.
2. Its processes hold a lock on the folder as long as one of them lives; the system frees it
   however they end. Who holds no lock is dead, and what it left may be removed.
3. An orderly end removes the sockets, and the folder if the server made it.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tidegate.engine.settings import SettingError
from tidegate.ipc.endpoints import EndpointError, ipc_endpoint, private_folder

PREFIX = "tidegate-serve-"
# A killed server's processes need a moment to notice, and hold the lock until then.
LOCK_WAIT_S = 3.0
LOCK_POLL_S = 0.05


class RunFolder(msgspec.Struct, frozen=True):
    """`lock` is the open descriptor that holds the lock; children inherit it."""

    path: Path
    lock: int
    is_temporary: bool

    def endpoint(self, name: str) -> str:
        """The endpoint of a socket in this folder. Raises `SettingError` if it is too long."""
        try:
            return ipc_endpoint(self.path, name)
        except EndpointError as error:
            raise SettingError(f"--run-dir: {error}") from None


@contextmanager
def open_run_folder(chosen: Path | None) -> Generator[RunFolder]:
    """A locked folder that nobody else can reach, without sockets of the dead.

    Raises `SettingError`, which names `--run-dir`, if that cannot be had.
    """
    folder = _make_fresh() if chosen is None else _take(chosen)
    try:
        remove_sockets(folder.path)
        yield folder
    finally:
        with suppress(OSError):
            remove_sockets(folder.path)
        if folder.is_temporary:
            shutil.rmtree(folder.path, ignore_errors=True)
        os.close(folder.lock)


def remove_sockets(folder: Path) -> None:
    """Remove the socket files in a folder and their locks, and nothing else."""
    sockets = {
        entry.name
        for entry in os.scandir(folder)
        if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
    }
    for name in sorted(sockets):
        (folder / name).unlink(missing_ok=True)
        (folder / f"{name}.lock").unlink(missing_ok=True)


def remove_dead_folders(base: Path) -> None:
    """Remove the temporary folders of servers that were killed."""
    for path in sorted(base.glob(f"{PREFIX}*")):
        with suppress(OSError):
            if path.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            lock = _open(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


def _make_fresh() -> RunFolder:
    base = Path(tempfile.gettempdir())
    remove_dead_folders(base)
    try:
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            lock = _open(path)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return RunFolder(path, lock, is_temporary=True)
            # Another server that starts right now has taken it for a dead one's.
            os.close(lock)
    except OSError as error:
        raise SettingError(
            f"--run-dir: no folder can be made in {base} ({error.strerror}); name one"
        ) from None


def _take(chosen: Path) -> RunFolder:
    try:
        path = private_folder(chosen.absolute())
        lock = _open(path)
    except EndpointError as error:
        raise SettingError(f"--run-dir: {error}") from None
    except OSError as error:
        raise SettingError(f"--run-dir: cannot use {chosen}: {error.strerror}") from None
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise SettingError(
                    f"--run-dir: a server is running in {chosen}; stop it, or choose another"
                ) from None
            time.sleep(LOCK_POLL_S)
        else:
            return RunFolder(path, lock, is_temporary=False)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
