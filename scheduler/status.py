"""What the scheduler tells of itself: can a token flow, and how full the pools are."""

import msgspec

from tidegate.ipc.protocol import CacheState, ModelCard, PoolState, Status
from tidegate.kvcache.demand import Lengths
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.core import Core
from tidegate.scheduler.door import find_refusal

SHORTEST = Lengths(Tokens(1), Tokens(2))  # The smallest request that needs every role.


def status_of(core: Core, card: ModelCard | None, epoch: str) -> Status:
    fleet = core.fleet
    refusal = find_refusal(fleet.healthy(), SHORTEST)
    waiting = fleet.waiting_count
    return Status(
        ready=refusal is None,
        reason="" if refusal is None else refusal.text,
        epoch=epoch,
        model="" if card is None else card.name,
        waiting=waiting,
        running=len(fleet.requests) - waiting,
        longest_prompt=core.longest_prompt(),
        default_max_tokens=fleet.settings.default_max_tokens,
        pools=tuple(
            PoolState(
                worker.worker_id,
                worker.role,
                group.name,
                group.page_tokens,
                group.page_bytes,
                pool.page_count,
                pool.free_count + pool.idle_count,
                pool.idle_count,
            )
            for worker in fleet.workers.values()
            for group, pool in zip(worker.layout.groups, worker.books.pools, strict=True)
        ),
        caches=tuple(
            CacheState(worker.worker_id, **msgspec.structs.asdict(worker.books.cache.stats))
            for worker in fleet.workers.values()
            if worker.books.cache is not None
        ),
    )
