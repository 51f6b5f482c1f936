"""How a scheduler asks its parent to kill a worker: process numbers, a line each, in a pipe.

The scheduler has closed the worker already, so nothing waits for the answer: the parent kills
a child of its own with this number, and takes no notice of others.
"""

import os
from contextlib import suppress

LINE_BYTES_MAX = 32  # Below PIPE_BUF: a line is written whole or not at all.


def ask_to_kill(fd: int, pid: int) -> None:
    """Never waits; what a parent that is gone or does not read misses is not told again."""
    os.set_blocking(fd, False)
    with suppress(BlockingIOError, BrokenPipeError):
        os.write(fd, f"{pid}\n".encode())


def read_pids(data: bytes) -> tuple[list[int], bytes]:
    """The numbers of the whole lines, and the rest. Lines that are no number are left out."""
    *lines, rest = data.split(b"\n")
    return [int(line) for line in lines if line.isdigit()], rest[:LINE_BYTES_MAX]
