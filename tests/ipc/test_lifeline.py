"""A child notices the end of its parent, whatever that was doing."""

import os
import select
import signal
import subprocess
import sys
import threading

from tidegate.ipc.lifeline import LIFELINE_STATUS, watch_lifeline

CHILD = """
import sys, time
from tidegate.ipc.lifeline import watch_lifeline
watch_lifeline(int(sys.argv[1]))
print("watching", flush=True)
while True:
    time.sleep(0.01)
"""

# Starts CHILD, tells its process id, and waits to be killed.
PARENT = """
import os, subprocess, sys
read_end, write_end = os.pipe()
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1], str(read_end)],
    pass_fds=[read_end],
    stdout=subprocess.PIPE,
)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_the_end_of_the_pipe_is_told_once_and_bytes_are_not_it() -> None:
    read_end, write_end = os.pipe()
    ended = threading.Event()
    watch_lifeline(read_end, ended.set)
    os.write(write_end, b"hello")
    assert not ended.wait(0.05)
    os.close(write_end)
    assert ended.wait(5)


def test_a_descriptor_that_cannot_be_read_counts_as_an_end() -> None:
    # A write end: reading it fails.
    read_end, write_end = os.pipe()
    ended = threading.Event()
    watch_lifeline(write_end, ended.set)
    assert ended.wait(5)
    os.close(read_end)


def test_a_process_exits_when_its_parent_closes_the_pipe() -> None:
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(read_end)],
        pass_fds=[read_end],
        stdout=subprocess.PIPE,
    )
    os.close(read_end)
    assert process.stdout is not None
    assert process.stdout.readline() == b"watching\n"
    os.close(write_end)
    assert process.wait(5) == LIFELINE_STATUS
    process.stdout.close()


def test_a_process_exits_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    pidfd = os.pidfd_open(child_pid)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert process_ended(pidfd, timeout_s=5)
    os.close(pidfd)


def process_ended(pidfd: int, timeout_s: float) -> bool:
    """A pidfd becomes readable when its process ends, whoever is its parent."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
