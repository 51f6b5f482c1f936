"""The private folder of a running server."""

import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from tidegate.cli import run_folder
from tidegate.cli.run_folder import PREFIX, open_run_folder, remove_dead_folders
from tidegate.engine.settings import SettingError


@pytest.fixture(autouse=True)
def temporary_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What these tests leave lies under `tmp_path`; waits are short."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 0.2)
    return tmp_path


def leave_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # A relative name, since the test's folder may be too long for a socket's address.
        before = Path.cwd()
        os.chdir(path.parent)
        try:
            listener.bind(path.name)
        finally:
            os.chdir(before)
    Path(f"{path}.lock").write_text("1\n")


def test_a_fresh_folder_is_private_and_gone_afterwards() -> None:
    with open_run_folder(None) as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        leave_socket(folder.path / "clients.sock")
    assert not folder.path.exists()


def test_two_servers_get_folders_of_their_own() -> None:
    with open_run_folder(None) as one, open_run_folder(None) as other:
        assert one.path != other.path
        assert one.path.exists()


def test_a_dead_servers_folder_is_removed_and_a_live_ones_is_kept(tmp_path: Path) -> None:
    dead = tmp_path / f"{PREFIX}dead"
    dead.mkdir()
    leave_socket(dead / "clients.sock")
    with open_run_folder(None) as live:
        remove_dead_folders(tmp_path)
        assert not dead.exists()
        assert live.path.exists()


def test_a_chosen_folder_loses_its_sockets_and_keeps_all_else(tmp_path: Path) -> None:
    chosen = tmp_path / "run"
    chosen.mkdir(mode=0o700)
    (chosen / "notes.lock").write_text("mine")
    leave_socket(chosen / "workers.sock")
    with open_run_folder(chosen):
        assert [entry.name for entry in chosen.iterdir()] == ["notes.lock"]
        leave_socket(chosen / "workers.sock")
    assert [entry.name for entry in chosen.iterdir()] == ["notes.lock"]


def test_a_chosen_folder_serves_one_server_at_a_time(tmp_path: Path) -> None:
    chosen = tmp_path / "run"
    with (
        open_run_folder(chosen),
        pytest.raises(SettingError, match="--run-dir: a server is running"),
        open_run_folder(chosen),
    ):
        pass
    with open_run_folder(chosen) as again:
        assert again.path == chosen


def test_the_folder_is_taken_as_long_as_a_child_holds_the_lock(tmp_path: Path) -> None:
    chosen = tmp_path / "run"
    with open_run_folder(chosen) as folder:
        inherited = os.dup(folder.lock)
    try:
        with pytest.raises(SettingError, match="is running"), open_run_folder(chosen):
            pass
    finally:
        os.close(inherited)
    with open_run_folder(chosen) as again:
        fcntl.flock(again.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    chosen = tmp_path / "run"
    chosen.mkdir(mode=0o755)
    chosen.chmod(0o755)
    with pytest.raises(SettingError, match=r"--run-dir: .*700"), open_run_folder(chosen):
        pass


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    chosen = tmp_path / "run"
    chosen.write_text("")
    with pytest.raises(SettingError, match="--run-dir"), open_run_folder(chosen):
        pass


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    chosen = tmp_path / ("long" * 30)
    with (
        open_run_folder(chosen) as folder,
        pytest.raises(SettingError, match=r"--run-dir: .*107"),
    ):
        folder.endpoint("clients.sock")
