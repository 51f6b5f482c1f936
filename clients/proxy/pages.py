"""The small GET pages: what is served, and whether a token can flow."""

import time
from typing import Any

import msgspec

from tidegate.clients.proxy.backend import Backend
from tidegate.clients.proxy.errors import ApiError
from tidegate.clients.proxy.exchange import Exchange
from tidegate.ipc.protocol import PoolState, Status

STARTED = int(time.time())


class ModelFields(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int  # Tokens of prompt and answer together.
    created: int = STARTED
    object: str = "model"
    owned_by: str = "tidegate"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelFields]
    object: str = "list"


class Health(msgspec.Struct, frozen=True):
    status: str  # "ready" or "not_ready".
    reason: str
    model: str
    waiting: int
    running: int
    longest_prompt: int
    default_max_tokens: int
    pools: list[dict[str, Any]]
    prefix_caches: list[dict[str, Any]]


class Pointer(msgspec.Struct, frozen=True):
    name: str = "tidegate"
    api: str = "/v1"
    models: str = "/v1/models"
    health: str = "/health"


async def root(backend: Backend, exchange: Exchange) -> None:
    await exchange.respond(200, msgspec.json.encode(Pointer()))


async def models(backend: Backend, exchange: Exchange) -> None:
    await exchange.respond(200, msgspec.json.encode(ModelList([_model(backend)])))


async def one_model(backend: Backend, exchange: Exchange, name: str) -> None:
    served = _model(backend)
    if name != served.id:
        raise ApiError(
            404,
            f"this model is not served here; {served.id!r} is",
            param="model",
            code="model_not_found",
        )
    await exchange.respond(200, msgspec.json.encode(served))


async def health(backend: Backend, exchange: Exchange) -> None:
    """200 only if a token can flow; 503 with the reason if not, or if that is not known."""
    status = await backend.status()
    reason = status.reason if not status.ready else backend.not_ready_reason
    body = msgspec.json.encode(_health(status, reason))
    await exchange.respond(200 if not reason else 503, body)


def _model(backend: Backend) -> ModelFields:
    card = backend.model.card
    return ModelFields(card.name, card.context)


def _health(status: Status, reason: str) -> Health:
    return Health(
        status="not_ready" if reason else "ready",
        reason=reason,
        model=status.model,
        waiting=status.waiting,
        running=status.running,
        longest_prompt=status.longest_prompt,
        default_max_tokens=status.default_max_tokens,
        pools=[_pool(pool) for pool in status.pools],
        prefix_caches=[msgspec.structs.asdict(cache) for cache in status.caches],
    )


def _pool(pool: PoolState) -> dict[str, Any]:
    """On the wire a list; here with names."""
    return msgspec.structs.asdict(pool) | {"role": pool.role.value}
