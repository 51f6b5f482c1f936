"""Where a client looks for the scheduler if nobody tells it."""

import os

from tidegate.ipc.endpoints import default_folder, ipc_endpoint

ENDPOINT_VARIABLE = "TIDEGATE_ENDPOINT"
CLIENT_SOCKET = "clients.sock"


def default_endpoint() -> str:
    """The endpoint in TIDEGATE_ENDPOINT, else `clients.sock` in this user's default folder.

    The default folder is `$XDG_RUNTIME_DIR/tidegate`, or `/tmp/tidegate-UID` without that.
    Raises `endpoints.EndpointError` if that folder cannot be trusted.
    """
    return os.environ.get(ENDPOINT_VARIABLE) or ipc_endpoint(default_folder(), CLIENT_SOCKET)
