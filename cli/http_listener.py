"""The HTTP port, taken before anything is started, so that no two servers ever share it."""

import errno
import os
import socket

from tidegate.engine.settings import SettingError

BACKLOG_COUNT = 512  # Connections that wait to be accepted.


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `SettingError`, which names `--host` or `--port`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise SettingError(
            f"--host: must be an address or a name of this machine; {host!r}: {text}"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Bound alone would not do: the system lets two sockets bind the port until one listens.
        listener.listen(BACKLOG_COUNT)
    except OSError as error:
        listener.close()
        raise SettingError(_explain(error, host, port)) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """An address that a browser on this machine can use."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"--port: {port} on {host} is in use by another program; choose another, "
                "or 0 for one that is free"
            )
        case errno.EADDRNOTAVAIL:
            return f"--host: {host} is no address of this machine; 127.0.0.1 is one"
        case errno.EACCES:
            return f"--port: user {os.getuid()} may not use {port}; choose one from 1024 on"
        case _:
            return f"--port: cannot listen on {host}:{port}: {error.strerror}"
