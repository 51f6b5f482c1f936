"""What an HTTP proxy is told when it starts."""

from pathlib import Path

import msgspec


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked where they are read from the command line.

    It listens on `listen_fd` if that is given, a listening socket that it takes over; else on
    `host` and `port`, where 0 means any port that is free.
    """

    endpoint: str | None = None  # The scheduler's, for clients; None: `default_endpoint()`.
    host: str = "127.0.0.1"
    port: int = 8000
    listen_fd: int | None = None
    lifeline_fd: int | None = None  # A pipe's read end: its end of file ends the proxy.
    log: Path | None = None  # None: standard error.
    log_level: str = "info"
    chat_template: str | None = None  # In place of the model's own.
    connect_ms_max: int = 60_000  # For the scheduler to be there.
    body_bytes_max: int = 8 * 1024 * 1024  # Of one request.
    body_bytes_total_max: int = 256 * 1024 * 1024  # Of all requests, while they are parsed.
    request_count_max: int = 4096  # Requests at a time; more are answered 503.
    stall_ms_max: int = 30_000  # A client that takes nothing for so long is cut off.
    stop_grace_ms: int = 1_500  # For running requests, when the proxy is told to stop.
