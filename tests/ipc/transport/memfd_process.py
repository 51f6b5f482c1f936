"""A process that owns a memfd. Run by the tests; its argument is the number of bytes.

It fills the memfd from its standard input, prints `PID:FD`, and ends when the input does.
"""

import os
import sys


def main() -> None:
    content = sys.stdin.buffer.read(int(sys.argv[1]))
    fd = os.memfd_create("tidegate-test", os.MFD_CLOEXEC)
    os.pwrite(fd, content, 0)
    print(f"{os.getpid()}:{fd}", flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
