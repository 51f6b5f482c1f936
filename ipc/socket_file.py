"""The socket file of an `ipc://` endpoint: one live owner at a time, nothing left behind.

1. The owner locks PATH.lock and writes its process number into it. The kernel drops the lock
   when the process ends, however it ends. A held lock means a live owner.
2. A socket file at PATH that nobody listens to was left by a killed process: it is removed.
   Anything else at PATH is reported and left alone.
3. The owner makes the listening socket itself and gives it to ZeroMQ. (Left to itself, ZeroMQ
   deletes whatever is at PATH before it binds, and deletes PATH at some moment after closing,
   when it may be the next owner's.)
4. `release` removes PATH, then PATH.lock, then drops the lock.
"""

import fcntl
import os
import re
import socket
import stat
import struct
import time

LISTEN_COUNT_MAX = 128  # Connections that wait to be accepted.
LOCK_TRY_COUNT_MAX = 16  # The lock file may vanish between opening and locking it.
LOCK_BYTES_MAX = 64  # More than a process number takes.
OWNER_READ_COUNT_MAX = 100  # An owner that has just locked the file has yet to write to it.
OWNER_READ_PAUSE_S = 0.002


class EndpointError(Exception):
    """An endpoint cannot be used. The message is one line that says which, and why."""


class SocketFile:
    """The socket file at `path` (absolute) and its lock, held by this process.

    Raises `EndpointError` at once if a live process holds the lock, naming it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock_path = f"{path}.lock"
        self._bound = False
        self._lock = self._take_lock()

    def listen(self) -> int:
        """Make the socket file. Returns the descriptor of the listening socket."""
        self._remove_if_stale()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._path)
            self._bound = True
            os.chmod(self._path, 0o600)
            listener.listen(LISTEN_COUNT_MAX)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise EndpointError(f"cannot bind ipc://{self._path}: {error.strerror}") from None
        return listener.detach()

    def release(self) -> None:
        """Give everything back. To be called once, after the socket was closed."""
        try:
            if self._bound:
                _unlink(self._path)
            _unlink(self._lock_path)
        finally:
            os.close(self._lock)

    def _take_lock(self) -> int:
        for _ in range(LOCK_TRY_COUNT_MAX):
            lock = self._open_lock()
            try:
                if self._try_lock(lock):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
        raise EndpointError(f"cannot lock {self._lock_path}: others take and drop it")

    def _try_lock(self, lock: int) -> bool:
        """False if the last owner removed the file after it was opened here."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use(_read_owner(lock)) from None
        if not self._is_current(lock):
            return False
        written = os.pread(lock, LOCK_BYTES_MAX, 0)
        if not re.fullmatch(rb"\d*\n?", written):
            raise EndpointError(f"{self._lock_path} is not a lock file; move it away")
        # In this order, so that a reader never finds it empty.
        os.ftruncate(lock, os.pwrite(lock, b"%d\n" % os.getpid(), 0))
        return True

    def _in_use(self, owner: str) -> EndpointError:
        return EndpointError(
            f"ipc://{self._path} is already in use by process {owner or 'unknown'}"
        )

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            return os.open(self._lock_path, flags, 0o600)
        except OSError as error:
            raise EndpointError(f"cannot open {self._lock_path}: {error.strerror}") from None

    def _is_current(self, lock: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), os.lstat(self._lock_path))
        except FileNotFoundError:
            return False

    def _remove_if_stale(self) -> None:
        try:
            mode = os.lstat(self._path).st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise EndpointError(f"cannot look at {self._path}: {error.strerror}") from None
        if not stat.S_ISSOCK(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a file that is not a socket"
            raise EndpointError(f"cannot bind ipc://{self._path}: {kind} is there already")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self._path)
            except ConnectionRefusedError:
                _unlink(self._path)
                return
            except BlockingIOError:
                raise self._in_use("") from None  # Too many wait to be accepted.
            except OSError as error:
                raise EndpointError(
                    f"cannot tell whether {self._path} is in use: {error.strerror}"
                ) from None
            # Whoever listens there holds no lock, so it is not one of ours.
            size = struct.calcsize("3i")
            peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            raise self._in_use(str(struct.unpack("3i", peer)[0]))


def _read_owner(lock: int) -> str:
    """The number that the owner has written, or is about to write into a file just made."""
    for _ in range(OWNER_READ_COUNT_MAX):
        owner = os.pread(lock, LOCK_BYTES_MAX, 0).decode(errors="replace").strip()
        if owner:
            return owner
        time.sleep(OWNER_READ_PAUSE_S)
    return ""


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise EndpointError(f"cannot remove {path}: {error.strerror}") from None
