"""Cuts TCP connections that their clients do not read.

The HTTP server shields its sends: a send to a client that reads nothing cannot be cancelled,
and the server has no call that ends one connection. So the connection is found by its addresses
among this process's descriptors, and shut down: the send fails, and its owner closes it.
"""

import os
import socket

DESCRIPTORS = "/proc/self/fd"


def cut_connections(port: int, client: tuple[str, int] | None = None) -> int:
    """Shut down this process's connections that came in at `port`: all, or one client's.

    Returns how many there were.
    """
    count = 0
    for name in os.listdir(DESCRIPTORS):
        found = _socket_of(int(name))
        if found is None:
            continue
        with found:
            try:
                peer = found.getpeername()
                if found.getsockname()[1] == port and client in (None, tuple(peer[:2])):
                    found.shutdown(socket.SHUT_RDWR)
                    count += 1
            except OSError:
                continue  # Not connected: listening, or gone meanwhile.
    return count


def _socket_of(descriptor: int) -> socket.socket | None:
    """The descriptor's TCP socket, as a duplicate that can be closed; None for other things."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
        return found
    found.close()
    return None
