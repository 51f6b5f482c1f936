"""tidegate serves large language models with prefill and decode on separate workers.

Importing this package loads neither torch nor trio; the names below are loaded on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.clients.library import AsyncClient as AsyncClient
    from tidegate.clients.library import Client as Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("AsyncClient", "Client"):
        from tidegate.clients import library

        return getattr(library, name)
    raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
