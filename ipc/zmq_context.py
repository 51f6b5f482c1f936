"""The one ZeroMQ context of a process.

A context that is garbage-collected while a socket is open blocks the process, so it always
ends here, by `destroy`, when its last user leaves.
"""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeAlias

import zmq

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
SocketOption: TypeAlias = int | bytes | str


class _Shared:
    """The context, and how many `with` blocks use it now."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.context: Context | None = None
        self.user_count = 0
        self.pid = 0


_shared = _Shared()


@contextmanager
def open_context() -> Generator[Context]:
    """This process's context; blocks may nest and may be in different threads.

    When the last block ends, sockets that are still open are closed without waiting for
    their messages, and the context is gone. Sockets closed with a linger time are waited
    for. A forked child begins anew: its parent's sockets are not its own.
    """
    with _shared.lock:
        if _shared.context is None or _shared.pid != os.getpid():
            _shared.context, _shared.user_count = zmq.Context(), 0
            _shared.pid = os.getpid()
        context = _shared.context
        _shared.user_count += 1
    try:
        yield context
    finally:
        with _shared.lock:
            _shared.user_count -= 1
            last = _shared.user_count == 0 and _shared.context is context
            if last:
                _shared.context = None
        if last:
            context.destroy(linger=0)
