"""The HTTP port is taken before anything is started."""

import socket

import pytest

from tidegate.cli.http_listener import open_listener, url_of
from tidegate.engine.settings import SettingError


def test_port_zero_takes_a_free_port_and_tells_it() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert url_of(listener) == f"http://127.0.0.1:{port}"


def test_a_port_in_use_is_named() -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=rf"^--port: {port} on 127\.0\.0\.1 is in use"):
            open_listener("127.0.0.1", port)


def test_a_port_is_free_again_after_its_connections_were_closed() -> None:
    with open_listener("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = first.accept()
            accepted.close()  # The server's side closes first and stays in TIME_WAIT.
    open_listener("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["203.0.113.1", "a" * 300])
def test_a_host_that_is_not_this_machine_is_named(host: str) -> None:
    with pytest.raises(SettingError, match=r"^--host"):
        open_listener(host, 0)


def test_any_address_is_shown_as_one_that_can_be_used() -> None:
    with open_listener("0.0.0.0", 0) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")
