"""Endpoints: one live owner, nothing deleted that is not ours, and errors that say why."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tidegate.ipc.endpoints import (
    IPC_PATH_BYTES_MAX,
    BoundEndpoint,
    EndpointError,
    bind_endpoint,
    default_folder,
    ipc_endpoint,
    private_folder,
)
from tidegate.ipc.zmq_context import open_context

OWNER = """
import sys, time, zmq
from tidegate.ipc.endpoints import EndpointError, bind_endpoint
from tidegate.ipc.zmq_context import open_context
with open_context() as context, context.socket(zmq.ROUTER) as router:
    sys.stdin.readline()
    try:
        with bind_endpoint(router, sys.argv[1]):
            print("bound", flush=True)
            sys.stdin.readline()
            router.close()
    except EndpointError as error:
        print(error, flush=True)
"""


def start_owner(endpoint: str) -> subprocess.Popen[str]:
    """A process that binds when it is told, and unbinds when it is told again."""
    command = [sys.executable, "-c", OWNER, endpoint]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def router() -> Iterator["zmq.Socket[bytes]"]:
    with open_context() as context, context.socket(zmq.ROUTER) as router:
        yield router


def exchange(router: "zmq.Socket[bytes]", address: str) -> bytes:
    """One message from a new peer through the endpoint."""
    with open_context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 1000
        peer.connect(address)
        peer.send(b"hello")
        assert router.poll(5000), "no message came through"
        return router.recv_multipart()[1]


def test_an_ipc_endpoint_works_and_leaves_nothing_behind(
    router: "zmq.Socket[bytes]", tmp_path: Path
) -> None:
    bound = bind_endpoint(router, ipc_endpoint(tmp_path, "s.sock"))
    assert bound.address == f"ipc://{tmp_path}/s.sock"
    assert (tmp_path / "s.sock").stat().st_mode & 0o077 == 0
    assert int((tmp_path / "s.sock.lock").read_text()) == os.getpid()
    for _ in range(3):
        assert exchange(router, bound.address) == b"hello"
    router.close()
    bound.close()
    bound.close()
    assert list(tmp_path.iterdir()) == []


def test_an_endpoint_can_be_bound_again_after_it_was_closed(tmp_path: Path) -> None:
    endpoint = ipc_endpoint(tmp_path, "s.sock")
    with open_context() as context:
        for _ in range(20):
            with context.socket(zmq.ROUTER) as router, bind_endpoint(router, endpoint) as bound:
                assert exchange(router, bound.address) == b"hello"
                router.close()
    assert list(tmp_path.iterdir()) == []


def test_a_live_owner_is_named(router: "zmq.Socket[bytes]", tmp_path: Path) -> None:
    endpoint = ipc_endpoint(tmp_path, "s.sock")
    with start_owner(endpoint) as owner:
        tell(owner)
        assert hear(owner) == "bound"
        with pytest.raises(EndpointError, match=f"already in use by process {owner.pid}$"):
            bind_endpoint(router, endpoint)
        assert (tmp_path / "s.sock").is_socket()
        tell(owner)
        assert owner.wait(10) == 0
    assert list(tmp_path.iterdir()) == []
    with bind_endpoint(router, endpoint):
        assert exchange(router, endpoint) == b"hello"


def test_what_a_killed_owner_left_is_taken_over(
    router: "zmq.Socket[bytes]", tmp_path: Path
) -> None:
    endpoint = ipc_endpoint(tmp_path, "s.sock")
    with start_owner(endpoint) as owner:
        tell(owner)
        assert hear(owner) == "bound"
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.sock", "s.sock.lock"]
    with bind_endpoint(router, endpoint):
        assert exchange(router, endpoint) == b"hello"
        router.close()
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_start_at_once_exactly_one_wins(tmp_path: Path) -> None:
    endpoint = ipc_endpoint(tmp_path, "s.sock")
    owners = [start_owner(endpoint) for _ in range(6)]
    try:
        for owner in owners:
            tell(owner)
        answers = [hear(owner) for owner in owners]
        winner = owners[answers.index("bound")]
        losers = [answer for answer in answers if answer != "bound"]
        assert losers == [f"{endpoint} is already in use by process {winner.pid}"] * 5
        tell(winner)
        assert winner.wait(10) == 0
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_vanishes_before_it_is_locked_is_made_anew(
    router: "zmq.Socket[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "s.sock.lock"
    real_flock = fcntl.flock
    opened: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        opened.append(descriptor)
        if len(opened) == 1:
            lock.unlink()  # As the last owner does, between the opening and the locking.
        real_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with bind_endpoint(router, f"ipc://{tmp_path}/s.sock"):
        assert int(lock.read_text()) == os.getpid()
    assert len(opened) == 2


def test_a_listener_without_a_lock_is_named_and_left_alone(
    router: "zmq.Socket[bytes]", tmp_path: Path
) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(EndpointError, match=f"already in use by process {os.getpid()}$"):
            bind_endpoint(router, f"ipc://{path}")
        assert path.is_socket()
        assert not path.with_name("s.sock.lock").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_reported_and_kept(
    kind: str, router: "zmq.Socket[bytes]", tmp_path: Path
) -> None:
    path = tmp_path / "s.sock"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        EndpointError, match=rf"cannot bind ipc://{path}: a f.* is there already"
    ):
        bind_endpoint(router, f"ipc://{path}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.sock"]
    assert kind != "file" or path.read_text() == "precious"


def test_a_file_in_the_lock_files_place_is_reported_and_kept(
    router: "zmq.Socket[bytes]", tmp_path: Path
) -> None:
    lock = tmp_path / "s.sock.lock"
    lock.write_text("precious")
    with pytest.raises(EndpointError, match=f"{lock} is not a lock file; move it away"):
        bind_endpoint(router, f"ipc://{tmp_path}/s.sock")
    assert lock.read_text() == "precious"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(EndpointError, match=f"cannot open {lock}: "):
        bind_endpoint(router, f"ipc://{tmp_path}/s.sock")


def test_a_path_may_have_107_bytes_and_no_more(
    router: "zmq.Socket[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("/tmp") / f"tidegate-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        fits = "ä" * ((IPC_PATH_BYTES_MAX - len(f"{folder}/")) // 2)
        fits += "x" * (IPC_PATH_BYTES_MAX - len(os.fsencode(folder / fits)))
        with bind_endpoint(router, ipc_endpoint(folder, fits)) as bound:
            assert exchange(router, bound.address) == b"hello"
        with pytest.raises(
            EndpointError, match=r"has 108 bytes.* may have 107; choose a shorter"
        ):
            ipc_endpoint(folder, fits + "x")
        monkeypatch.chdir(folder)  # A relative path counts in full: ZeroMQ's peers need that.
        with pytest.raises(EndpointError, match="has 108 bytes"):
            bind_endpoint(router, f"ipc://{fits}x")
        assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()


def test_an_occupied_tcp_port_is_named(router: "zmq.Socket[bytes]") -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EndpointError) as caught:
            bind_endpoint(router, f"tcp://127.0.0.1:{port}")
    assert str(caught.value) == f"tcp port {port} on 127.0.0.1 is already in use"


def test_a_tcp_endpoint_tells_its_real_port(router: "zmq.Socket[bytes]") -> None:
    with bind_endpoint(router, "tcp://127.0.0.1:*") as bound:
        assert int(bound.address.rpartition(":")[2]) > 0
        assert exchange(router, bound.address) == b"hello"


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("", "'' is no endpoint; use ipc://PATH or tcp://HOST:PORT"),
        ("/run/x", "'/run/x' is no endpoint; use ipc://PATH or tcp://HOST:PORT"),
        ("http://x:1", "'http://x:1' is no endpoint; use ipc://PATH or tcp://HOST:PORT"),
        ("ipc://", "ipc:// names no socket file; give a path in a folder"),
        ("ipc://*", "ipc://* names no socket file; give a path in a folder"),
        ("ipc://@open-to-all", "ipc://@open-to-all names no socket file"),
        ("ipc:///no/such/folder/s", "cannot open /no/such/folder/s.lock: No such file"),
        ("tcp://127.0.0.1", "tcp://127.0.0.1 is no endpoint; use tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "with a port up to 65535"),
        ("tcp://127.0.0.1:http", "with a port up to 65535"),
        ("tcp://203.0.113.7:5555", "203.0.113.7 is no address of this machine"),
        ("tcp://no-such-device:5555", "no-such-device is no address of this machine"),
    ],
)
def test_a_bad_endpoint_gets_one_clear_line(
    endpoint: str, message: str, router: "zmq.Socket[bytes]"
) -> None:
    with pytest.raises(EndpointError) as caught:
        bind_endpoint(router, endpoint)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_private_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "a" / "b")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder(folder) == folder


def test_a_folder_that_is_not_private_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(EndpointError, match=r"open is open to other users \(mode 755\)"):
        private_folder(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(EndpointError, match=r"cannot make the folder .*file: File exists"):
        private_folder(tmp_path / "file")
    private_folder(tmp_path / "private")
    (tmp_path / "link").symlink_to(tmp_path / "private")
    with pytest.raises(EndpointError, match="is not a folder"):
        private_folder(tmp_path / "link")


def test_the_default_folder_is_private_and_this_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_folder() == tmp_path / "tidegate"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_folder() == tmp_path / f"tidegate-{os.getuid()}"


def test_closing_a_tcp_endpoint_twice_is_allowed() -> None:
    bound = BoundEndpoint("tcp://127.0.0.1:1")
    bound.close()
    bound.close()


def test_an_owner_that_has_locked_and_not_yet_written_is_named_when_it_has(
    router: "zmq.Socket[bytes]", tmp_path: Path
) -> None:
    lock = tmp_path / "s.sock.lock"
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    writer = threading.Timer(0.02, lambda: os.write(descriptor, b"123\n"))
    writer.start()
    with (
        pytest.raises(EndpointError, match=r"is already in use by process 123$"),
        bind_endpoint(router, f"ipc://{tmp_path}/s.sock"),
    ):
        pass
    writer.join()
    os.close(descriptor)
