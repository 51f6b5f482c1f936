"""Puts a worker together: model, pools, link, transport, rows and step loop."""

import os
from collections.abc import Callable
from typing import NoReturn

import torch

from tidegate.engine.joining import WorkerLink, join
from tidegate.engine.loading import LoadedEngine, load_engine
from tidegate.engine.rows import RowTable
from tidegate.engine.runner import Runner
from tidegate.engine.settings import WorkerSettings
from tidegate.engine.step_loop import StepLoop
from tidegate.ipc.blocking_peer import BlockingPeer
from tidegate.ipc.log import Log
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import PROTOCOL_VERSION, Goodbye, Hello, encode
from tidegate.ipc.transport.interface import PageTransport
from tidegate.ipc.transport.shared_memory import SharedMemoryTransport
from tidegate.ipc.transport.unavailable import UnavailableTransport
from tidegate.ipc.zmq_context import open_context
from tidegate.kvcache.page_store import PageStore

IDENTITY_BYTES = 16
LINGER_MS = 200  # For the goodbye to leave.


def serve(settings: WorkerSettings, log: Log, say: Callable[[str], None]) -> NoReturn:
    """Load, join and loop. Never returns: an exception says why it ends.

    Whatever that is, the scheduler is sent a goodbye, if it can be reached.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    engine = load_engine(settings, say)
    with (
        open_context() as context,
        BlockingPeer(context, settings.endpoint, _new_identity()) as link,
    ):
        try:
            _join_and_loop(settings, engine, link, log, say)
        except BaseException as error:
            if link.connected and not link.lost:
                link.send(encode(Goodbye(str(error) or type(error).__name__)))
                link.close(LINGER_MS)
            raise


def _new_identity() -> bytes:
    """Random, in hexadecimal digits: ZeroMQ keeps identities with a leading zero for itself."""
    return os.urandom(IDENTITY_BYTES).hex().encode()


def _join_and_loop(
    settings: WorkerSettings,
    engine: LoadedEngine,
    link: WorkerLink,
    log: Log,
    say: Callable[[str], None],
) -> NoReturn:
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        worker=settings.name,
        role=settings.role,
        pid=os.getpid(),
        fingerprint=engine.fingerprint,
        card=engine.card,
        handle=engine.store.handle(),
        row_count_max=settings.max_running,
    )
    welcome, frames = join(link, hello, say)
    log.info(
        LogEvent.PROCESS_READY,
        worker=settings.name,
        pool=welcome.pool,
        epoch=welcome.epoch,
        rows=welcome.row_count,
        pages={pool.name: pool.page_count for pool in engine.pools.pools},
    )
    table = RowTable(
        engine.layout,
        engine.pools.page_counts,
        welcome.row_count,
        engine.card.vocab_size,
        engine.card.eos_ids,
    )
    runner = Runner(engine.model, engine.store, table)
    transport = _transport(engine.store)
    loop = StepLoop(link, table, runner, engine.store, transport, welcome, log)
    loop.run(frames)


def _transport(store: PageStore) -> PageTransport:
    if store.device.type != "cpu":
        return UnavailableTransport(f"pages cannot be copied into a pool on {store.device}")
    return SharedMemoryTransport(store.layout, store.geometry, store.buffer)
