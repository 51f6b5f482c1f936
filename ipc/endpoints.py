"""Endpoints: where a socket is reached, and what can go wrong when it is bound.

`ipc://PATH` is the default, in a folder that only this user may enter; one live owner at a time
has it (see `socket_file`). `tcp://HOST:PORT` is for several machines.
"""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Protocol, Self

import zmq

from tidegate.ipc.socket_file import EndpointError as EndpointError
from tidegate.ipc.socket_file import SocketFile

IPC_PATH_BYTES_MAX = 107  # What the kernel's address structure holds, less the final zero.
TCP_PORT_MAX = 65535


class BindableSocket(Protocol):
    """A ZeroMQ socket: `zmq_trio.Socket`, or a plain one."""

    def bind(self, endpoint: str, /) -> object: ...
    def set(self, option: int, value: int, /) -> None: ...
    def get(self, option: int, /) -> int | bytes: ...


def private_folder(path: Path) -> Path:
    """The folder at `path`, made if it is missing, which only this user may enter.

    Raises `EndpointError` if it belongs to somebody else, or others may enter it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise EndpointError(f"cannot make the folder {path}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise EndpointError(f"{path} is not a folder (a link to one does not do)")
    if found.st_uid != os.getuid():
        raise EndpointError(f"{path} belongs to user {found.st_uid}, not to {os.getuid()}")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise EndpointError(f"{path} is open to other users (mode {mode:o}); make it 700")
    return path


def default_folder() -> Path:
    """This user's private folder for sockets: below XDG_RUNTIME_DIR, else TMPDIR."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return private_folder(Path(runtime, "tidegate"))
    return private_folder(Path(tempfile.gettempdir(), f"tidegate-{os.getuid()}"))


def ipc_endpoint(folder: Path, name: str) -> str:
    """The endpoint of the socket file `name` in `folder`.

    Raises `EndpointError` if the path is too long for the address of a socket.
    """
    path = os.path.abspath(folder / name)
    check_ipc_path(path)
    return f"ipc://{path}"


def check_ipc_path(path: str) -> None:
    """Raise `EndpointError` unless `path` can be the address of a socket file."""
    if not path or path[0] in "*@":
        raise EndpointError(f"ipc://{path} names no socket file; give a path in a folder")
    length = len(os.fsencode(path))
    if length > IPC_PATH_BYTES_MAX:
        raise EndpointError(
            f"the path {path} has {length} bytes, and a socket file's may have"
            f" {IPC_PATH_BYTES_MAX}; choose a shorter folder"
        )


class BoundEndpoint:
    """An endpoint in use by a socket of this process. Close it after the socket."""

    def __init__(self, address: str, files: "SocketFile | None" = None) -> None:
        self.address = address  # What others connect to: with the real port for tcp.
        self._files = files

    def close(self) -> None:
        """Remove the socket file and the lock. May be called twice."""
        if self._files is not None:
            self._files.release()
            self._files = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_endpoint(endpoint: str) -> None:
    """Raise `EndpointError` unless it reads `ipc://PATH` or `tcp://HOST:PORT`."""
    transport, separator, address = endpoint.partition("://")
    if separator and transport == "ipc":
        check_ipc_path(address)
        return
    if not separator or transport != "tcp":
        raise EndpointError(f"{endpoint!r} is no endpoint; use ipc://PATH or tcp://HOST:PORT")
    host, _, port = address.rpartition(":")
    if not host or not (port == "*" or (port.isdecimal() and int(port) <= TCP_PORT_MAX)):
        raise EndpointError(
            f"{endpoint} is no endpoint; use tcp://HOST:PORT with a port up to {TCP_PORT_MAX}"
        )


def bind_endpoint(bindable: BindableSocket, endpoint: str) -> BoundEndpoint:
    """Bind the socket to `ipc://PATH` or `tcp://HOST:PORT` (port `*`: any that is free).

    Raises `EndpointError` when the endpoint is malformed, in use, or cannot be had.
    """
    check_endpoint(endpoint)
    transport, _, address = endpoint.partition("://")
    return _bind_ipc(bindable, address) if transport == "ipc" else _bind_tcp(bindable, address)


def _bind_tcp(bindable: BindableSocket, address: str) -> BoundEndpoint:
    host, _, port = address.rpartition(":")
    try:
        bindable.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise EndpointError(f"tcp port {port} on {host} is already in use") from None
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
            raise EndpointError(
                f"cannot bind tcp://{address}: {host} is no address of this machine"
            ) from None
        raise EndpointError(f"cannot bind tcp://{address}: {error}") from None
    bound = bindable.get(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return BoundEndpoint(bound.rstrip(b"\0").decode())


def _bind_ipc(bindable: BindableSocket, path: str) -> BoundEndpoint:
    path = os.path.abspath(path)
    check_ipc_path(path)
    files = SocketFile(path)
    try:
        descriptor = files.listen()
        # ZeroMQ owns the descriptor from here on, and closes it with the socket.
        bindable.set(zmq.USE_FD, descriptor)
        try:
            bindable.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            os.close(descriptor)
            raise EndpointError(f"cannot bind ipc://{path}: {error}") from None
        finally:
            bindable.set(zmq.USE_FD, -1)
    except BaseException:
        files.release()
        raise
    return BoundEndpoint(f"ipc://{path}", files)
