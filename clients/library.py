"""The ZeroMQ client library: everything that its users import.

For trio:

    async with AsyncClient() as client:
        async with client.generate("The days of the week are", max_tokens=16) as tokens:
            async for token in tokens:
                print(token.text, end="")
        print(tokens.result)

Leaving the inner block early cancels the request. `async for token in client.generate(...)`
without the block works as well: the request is cancelled when the generation is dropped, which
is at once after a `break`, unless something else refers to it.

Without trio:

    with Client() as client:
        for token in client.generate("The days of the week are", max_tokens=16):
            print(token.text, end="")
"""

from tidegate.clients.async_client import AsyncClient
from tidegate.clients.blocking import BlockingGeneration, Client
from tidegate.clients.endpoint_default import default_endpoint
from tidegate.clients.errors import (
    ClientError,
    ConnectFailed,
    RequestFailed,
    RequestRefused,
    ServerLost,
    TextUnavailable,
)
from tidegate.clients.generation import Generation, Token
from tidegate.clients.options import Options
from tidegate.clients.result import Result
from tidegate.ipc.protocol import EndReason, PageHolder, Phase, Waiting, WaitKind

__all__ = [
    "AsyncClient",
    "BlockingGeneration",
    "Client",
    "ClientError",
    "ConnectFailed",
    "EndReason",
    "Generation",
    "Options",
    "PageHolder",
    "Phase",
    "RequestFailed",
    "RequestRefused",
    "Result",
    "ServerLost",
    "TextUnavailable",
    "Token",
    "WaitKind",
    "Waiting",
    "default_endpoint",
]
