"""Process numbers in a pipe, however they arrive."""

import os

from tidegate.ipc.fence_pipe import LINE_BYTES_MAX, ask_to_kill, read_pids


def test_numbers_come_out_as_they_went_in_however_the_bytes_are_cut() -> None:
    read_end, write_end = os.pipe()
    ask_to_kill(write_end, 12)
    ask_to_kill(write_end, 34567)
    found: list[int] = []
    rest = b""
    for byte in os.read(read_end, 100):
        pids, rest = read_pids(rest + bytes([byte]))
        found += pids
    assert (found, rest) == ([12, 34567], b"")
    os.close(read_end)
    ask_to_kill(write_end, 1)  # Nobody reads any more: nothing happens.
    os.close(write_end)


def test_asking_never_waits_for_a_reader() -> None:
    read_end, write_end = os.pipe()
    for pid in range(50_000):
        ask_to_kill(write_end, pid)
    os.close(read_end)
    os.close(write_end)


def test_what_is_no_number_is_left_out_and_bounded() -> None:
    assert read_pids(b"x\n-3\n7\n") == ([7], b"")
    assert read_pids(b"9" * 1000) == ([], b"9" * LINE_BYTES_MAX)
