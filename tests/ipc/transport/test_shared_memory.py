"""Pages pulled out of another process's pool: contents, mismatches, and the owner's death."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tidegate.ipc.protocol import (
    Fetch,
    FetchResult,
    Incarnation,
    Peer,
    PeerGone,
    PoolHandle,
    PoolId,
    PullGroup,
    RequestId,
    Ticket,
    pack_ids,
)
from tidegate.ipc.transport.shared_memory import SharedMemoryTransport
from tidegate.kvcache.geometry import Geometry, geometry
from tidegate.kvcache.layout import All, Group, Layout, TensorSpec, Tokens, Window

PAGE = 4
LAYOUT = Layout(
    (
        Group("full", All(), Tokens(PAGE), (TensorSpec("k", 0, (3,), "bfloat16"),)),
        Group(
            "window", Window(Tokens(6)), Tokens(PAGE), (TensorSpec("k", 1, (5,), "float32"),)
        ),
    ),
    swa_only_transfer=True,
)
SOURCE_COUNTS = (300, 70)
OWN_COUNTS = (280, 60)
POOL = PoolId("source")
INCARNATION = Incarnation(4)
UNTOUCHED = 0xEE


def page_content(group: int, page_id: int, page_bytes: int) -> bytes:
    """What the source's page holds: its name over and over, then a last byte of 255."""
    name = bytes([group + 1, page_id % 251, page_id // 251, 7])
    return (name * page_bytes)[: page_bytes - 1] + b"\xff"


def source_bytes() -> bytes:
    shape = geometry(LAYOUT, SOURCE_COUNTS)
    pool = bytearray(shape.byte_count)
    for group, count in enumerate(SOURCE_COUNTS):
        size = shape.page_bytes[group]
        for page_id in range(count):
            begin = shape.page_offset(group, page_id)
            pool[begin : begin + size] = page_content(group, page_id, size)
    return bytes(pool)


class SourceProcess:
    """A process whose pool's pages each tell their group and id."""

    def __init__(self) -> None:
        script = Path(__file__).parent / "memfd_process.py"
        content = source_bytes()
        self.process = subprocess.Popen(
            [sys.executable, script, str(len(content))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(content)
        self.process.stdin.flush()
        self.address = self.process.stdout.readline().decode().strip()

    def handle(self, **changes: object) -> PoolHandle:
        byte_count = geometry(LAYOUT, SOURCE_COUNTS).byte_count
        handle = PoolHandle("shared_memory", self.address, byte_count, SOURCE_COUNTS)
        return msgspec.structs.replace(handle, **changes)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


class Target:
    """This process's pool, and the transport that pulls into it."""

    def __init__(self) -> None:
        self.geometry: Geometry = geometry(LAYOUT, OWN_COUNTS)
        self.bytes = bytearray([UNTOUCHED]) * self.geometry.byte_count
        self.transport = SharedMemoryTransport(LAYOUT, self.geometry, memoryview(self.bytes))

    def page(self, group: int, page_id: int) -> bytes:
        begin = self.geometry.page_offset(group, page_id)
        return bytes(self.bytes[begin : begin + self.geometry.page_bytes[group]])

    @property
    def is_untouched(self) -> bool:
        return self.bytes.count(UNTOUCHED) == len(self.bytes)


@pytest.fixture(scope="module")
def source() -> Iterator[SourceProcess]:
    process = SourceProcess()
    yield process
    process.kill()


@pytest.fixture
def target(source: SourceProcess) -> Iterator[Target]:
    target = Target()
    target.transport.attach(Peer(POOL, INCARNATION, source.handle()))
    yield target
    target.transport.close()


def make_fetch(
    length: int,
    full: tuple[list[int], list[int]],
    window: tuple[list[int], list[int]],
    *,
    full_from: int = 0,
    window_from: int = 0,
) -> Fetch:
    return Fetch(
        Ticket(9),
        RequestId("r"),
        POOL,
        INCARNATION,
        (
            PullGroup(full_from, pack_ids(full[0]), pack_ids(full[1])),
            PullGroup(window_from, pack_ids(window[0]), pack_ids(window[1])),
        ),
        length,
    )


def assert_copied(target: Target, group: int, source_ids: list[int], ids: list[int]) -> None:
    size = target.geometry.page_bytes[group]
    for source_id, own_id in zip(source_ids, ids, strict=True):
        assert target.page(group, own_id) == page_content(group, source_id, size)


def test_one_page_of_each_group_is_copied(target: Target) -> None:
    result = target.transport.fetch(make_fetch(1, ([299], [0]), ([69], [59])))
    assert (result.ticket, result.error) == (9, "")
    assert result.byte_count == sum(target.geometry.page_bytes)
    assert_copied(target, 0, [299], [0])
    assert_copied(target, 1, [69], [59])


def test_many_pages_land_where_the_fetch_says_and_nowhere_else(target: Target) -> None:
    source_ids, ids = list(range(250)), list(range(279, 29, -1))
    window_source_ids, window_ids = [5, 3], [1, 2]
    fetch = make_fetch(
        1000, (source_ids, ids), (window_source_ids, window_ids), window_from=992
    )
    assert target.transport.fetch(fetch).error == ""
    assert_copied(target, 0, source_ids, ids)
    assert_copied(target, 1, window_source_ids, window_ids)
    others = [(0, page) for page in range(30)] + [(1, page) for page in range(3, 60)]
    for group, page in [*others, (1, 0)]:
        assert set(target.page(group, page)) == {UNTOUCHED}


def test_empty_runs_copy_nothing_and_are_no_error(target: Target) -> None:
    fetch = make_fetch(9, ([], []), ([2], [3]), full_from=12, window_from=8)
    result = target.transport.fetch(fetch)
    assert (result.error, result.byte_count) == ("", target.geometry.page_bytes[1])
    nothing = make_fetch(9, ([], []), ([], []), full_from=12, window_from=8)
    result = target.transport.fetch(nothing)
    assert (result.error, result.byte_count) == ("", 0)


@pytest.mark.parametrize(
    ("fetch", "words"),
    [
        (make_fetch(8, ([1, 2], [1]), ([1, 2], [1, 2])), "2 source pages for 1 target"),
        (make_fetch(8, ([1], [1]), ([1, 2], [1, 2])), "do not end with the last page of 8"),
        (make_fetch(8, ([1, 2, 3], [1, 2, 3]), ([1, 2], [1, 2])), "3 pages from page 0"),
        (make_fetch(8, ([1, 2], [1, 2]), ([1], [1]), window_from=2), "does not begin a page"),
        (make_fetch(8, ([1, 2], [1, 2]), ([], []), window_from=12), "0 pages from page 3"),
        (make_fetch(8, ([1], [1]), ([1], [1]), full_from=-4), "does not begin a page"),
        (make_fetch(8, ([1, 300], [1, 2]), ([1, 2], [1, 2])), "source page 300 is not in"),
        (make_fetch(8, ([1, 2], [1, 280]), ([1, 2], [1, 2])), "target page 280 is not in"),
        (make_fetch(8, ([1, 2], [1, 2]), ([1, 2], [1, 60])), "target page 60 is not in"),
        (make_fetch(8, ([1, 2], [3, 3]), ([1, 2], [1, 2])), "a target page is named twice"),
        (make_fetch(8, ([2, 2], [1, 3]), ([1, 2], [1, 2])), "a source page is named twice"),
        (make_fetch(0, ([], []), ([], [])), "the length is 0"),
    ],
)
def test_a_mismatch_fails_the_fetch_and_copies_nothing(
    target: Target, fetch: Fetch, words: str
) -> None:
    result = target.transport.fetch(fetch)
    assert words in result.error
    assert result.byte_count == 0
    assert target.is_untouched


def test_a_fetch_for_another_layout_copies_nothing(target: Target) -> None:
    fetch = make_fetch(8, ([1, 2], [1, 2]), ([1, 2], [1, 2]))
    short = msgspec.structs.replace(fetch, groups=fetch.groups[:1])
    assert "1 groups" in target.transport.fetch(short).error
    broken = msgspec.structs.replace(
        fetch, groups=(PullGroup(0, b"abc", b"abc"), fetch.groups[1])
    )
    assert "not a list of uint32" in target.transport.fetch(broken).error
    assert target.is_untouched


def test_another_pool_or_incarnation_is_not_known(target: Target) -> None:
    fetch = make_fetch(1, ([1], [1]), ([1], [1]))
    other = msgspec.structs.replace(fetch, source_incarnation=Incarnation(5))
    assert "incarnation 5 is not known" in target.transport.fetch(other).error
    other = msgspec.structs.replace(fetch, source_pool=PoolId("elsewhere"))
    assert "pool elsewhere" in target.transport.fetch(other).error


def test_a_pool_is_forgotten_when_its_owner_is_gone(target: Target) -> None:
    fetch = make_fetch(1, ([1], [1]), ([1], [1]))
    target.transport.detach(PeerGone(POOL, Incarnation(3)))
    assert target.transport.fetch(fetch).error == ""
    target.transport.detach(PeerGone(POOL, INCARNATION))
    assert "is not known" in target.transport.fetch(fetch).error


def mapped_memfds() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:tidegate-test")


def test_a_mapping_is_made_once_and_let_go(source: SourceProcess) -> None:
    before = mapped_memfds()
    target = Target()
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        target.transport.attach(Peer(POOL, INCARNATION, source.handle()))
    assert mapped_memfds() == before + 1
    target.transport.detach(PeerGone(POOL, INCARNATION))
    assert mapped_memfds() == before
    target.transport.attach(Peer(POOL, INCARNATION, source.handle()))
    target.transport.close()
    assert mapped_memfds() == before
    assert len(os.listdir("/proc/self/fd")) <= fds


def fetch_from(handle: PoolHandle) -> FetchResult:
    target = Target()
    target.transport.attach(Peer(POOL, INCARNATION, handle))
    result = target.transport.fetch(make_fetch(1, ([1], [1]), ([1], [1])))
    target.transport.close()
    return result


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"transport": "none"}, "its transport is 'none'"),
        ({"address": "nonsense"}, "not PID:FD"),
        ({"address": "1:../../etc/passwd"}, "not PID:FD"),
        ({"byte_count": 4096}, "its page counts make"),
        ({"page_counts": (300,)}, "1 page counts"),
        ({"page_counts": (300, -1)}, "negative"),
        ({"address": f"{os.getpid()}:99999"}, "could not be mapped"),
    ],
)
def test_a_handle_that_cannot_be_mapped_fails_the_fetch(
    source: SourceProcess, changes: dict[str, object], words: str
) -> None:
    error = fetch_from(source.handle(**changes)).error
    assert error.startswith("pool source could not be mapped")
    assert words in error


def test_a_file_that_is_no_memfd_is_not_mapped(source: SourceProcess, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(source.handle().byte_count))
    with path.open("rb") as file:
        handle = source.handle(address=f"{os.getpid()}:{file.fileno()}")
        assert "is not a memfd" in fetch_from(handle).error


def test_a_memfd_that_is_too_short_is_not_mapped(source: SourceProcess) -> None:
    fd = os.memfd_create("tidegate-short", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 4096)
        handle = source.handle(address=f"{os.getpid()}:{fd}")
        assert "has 4096 bytes" in fetch_from(handle).error
    finally:
        os.close(fd)


def test_a_pool_that_is_mapped_can_be_read_after_its_owner_was_killed() -> None:
    source = SourceProcess()
    target = Target()
    target.transport.attach(Peer(POOL, INCARNATION, source.handle()))
    source.kill()
    assert target.transport.fetch(make_fetch(1, ([8], [1]), ([9], [1]))).error == ""
    assert_copied(target, 0, [8], [1])
    target.transport.close()
    # One that was never mapped cannot be reached any more.
    assert "could not be mapped" in fetch_from(source.handle()).error
