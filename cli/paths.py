"""Where things are unless an option says otherwise."""

import os
from pathlib import Path

WORKER_SOCKET = "workers.sock"


def default_log_file() -> Path:
    """`tidegate/log.jsonl` in the user's folder for state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "tidegate" / "log.jsonl"


def default_worker_endpoint() -> str:
    """Where workers find a scheduler that was started alone; see `default_endpoint` of clients.

    Raises `EndpointError` if the user's folder for sockets cannot be trusted.
    """
    from tidegate.ipc.endpoints import default_folder, ipc_endpoint

    return ipc_endpoint(default_folder(), WORKER_SOCKET)
