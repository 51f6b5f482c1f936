"""A process ends when its parent is gone, however the parent went.

The parent keeps the write end of a pipe and never writes to it. When the parent ends, the
system closes that end, and the child reads the end of the file.
"""

import os
import threading
from collections.abc import Callable

LIFELINE_STATUS = 1  # The exit status of a process whose parent is gone.


def watch_lifeline(fd: int, on_end: Callable[[], None] | None = None) -> None:
    """Call `on_end` from a thread of its own when the pipe's other end is closed.

    `fd` is the pipe's read end, and belongs to this function from now on. Without `on_end` the
    process exits on the spot with `LIFELINE_STATUS`: nobody is left who could be told more.
    """
    os.set_inheritable(fd, False)
    # A daemon thread does not keep the process from ending first.
    thread = threading.Thread(
        target=_watch, args=(fd, on_end or _exit), name="lifeline", daemon=True
    )
    thread.start()


def _watch(fd: int, on_end: Callable[[], None]) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except OSError:
        pass  # A descriptor that cannot be read tells of no parent either.
    on_end()


def _exit() -> None:
    os._exit(LIFELINE_STATUS)
