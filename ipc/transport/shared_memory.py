"""Page transport on one host: the source's memfd is mapped read-only, and pages are copied.

1. `attach` opens `/proc/PID/fd/FD` of the source and maps it. The map outlives the source.
2. `fetch` checks the manifest, then copies each page with one memmove.
3. `detach`, on `PeerGone`, unmaps it.
"""

import mmap
import os
import time

from tidegate.ipc.protocol import (
    Fetch,
    FetchResult,
    Incarnation,
    Peer,
    PeerGone,
    PoolHandle,
    PoolId,
)
from tidegate.ipc.transport.manifest import ManifestError, PageCopies, check_manifest
from tidegate.kvcache.geometry import Geometry, geometry
from tidegate.kvcache.layout import Layout

TRANSPORT = "shared_memory"
MEMFD_PREFIX = "/memfd:"

_PoolKey = tuple[PoolId, Incarnation]


class _Unreachable(Exception):
    """A pool that cannot be mapped; the text says why."""


class _Mapping:
    """Another worker's pool, mapped read-only."""

    def __init__(self, handle: PoolHandle, layout: Layout) -> None:
        if len(handle.page_counts) != len(layout.groups):
            raise _Unreachable(f"its handle has {len(handle.page_counts)} page counts")
        if min(handle.page_counts) < 0:
            raise _Unreachable("its handle has a negative page count")
        self.geometry: Geometry = geometry(layout, handle.page_counts)
        if self.geometry.byte_count != handle.byte_count:
            raise _Unreachable(
                f"its handle says {handle.byte_count} bytes, its page counts make "
                f"{self.geometry.byte_count}"
            )
        self._map = _map_read_only(handle)
        self.view = memoryview(self._map)

    def close(self) -> None:
        self.view.release()
        self._map.close()


class SharedMemoryTransport:
    """Pulls pages into `buffer`, the bytes of this worker's pool, which has `geometry`.

    Every pool it is told of must have the same layout. `close` must be called before the
    pool's memory is given back.
    """

    def __init__(self, layout: Layout, own: Geometry, buffer: memoryview) -> None:
        assert not buffer.readonly and buffer.nbytes >= own.byte_count
        self._layout = layout
        self._own = own
        self._buffer = buffer
        self._mappings: dict[_PoolKey, _Mapping] = {}
        self._failures: dict[_PoolKey, str] = {}

    def attach(self, peer: Peer) -> None:
        key = (peer.pool, peer.incarnation)
        self._forget(key)
        try:
            self._mappings[key] = _Mapping(peer.handle, self._layout)
        except (_Unreachable, OSError, ValueError) as error:
            self._failures[key] = f"pool {peer.pool} could not be mapped: {error}"

    def detach(self, gone: PeerGone) -> None:
        self._forget((gone.pool, gone.incarnation))

    def fetch(self, fetch: Fetch) -> FetchResult:
        begin_ns = time.perf_counter_ns()
        error, byte_count = "", 0
        try:
            mapping = self._mapping_of(fetch)
            copies = check_manifest(fetch, self._layout, mapping.geometry, self._own)
            byte_count = self._copy(mapping, copies)
        except (_Unreachable, ManifestError) as mismatch:
            error = str(mismatch)
        busy_us = (time.perf_counter_ns() - begin_ns) // 1000
        return FetchResult(fetch.ticket, error, byte_count, busy_us)

    def close(self) -> None:
        for key in (*self._mappings, *self._failures):
            self._forget(key)
        self._buffer.release()

    def _mapping_of(self, fetch: Fetch) -> _Mapping:
        key = (fetch.source_pool, fetch.source_incarnation)
        mapping = self._mappings.get(key)
        if mapping is not None:
            return mapping
        if key in self._failures:
            raise _Unreachable(self._failures[key])
        raise _Unreachable(
            f"pool {fetch.source_pool} of incarnation {fetch.source_incarnation} is not known"
        )

    def _copy(self, mapping: _Mapping, copies: tuple[PageCopies, ...]) -> int:
        byte_count = 0
        for part in copies:
            page_bytes = self._own.page_bytes[part.group]
            for source_id, target_id in zip(part.source_ids, part.target_ids, strict=True):
                source = mapping.geometry.page_offset(part.group, source_id)
                target = self._own.page_offset(part.group, target_id)
                # One memmove of contiguous bytes on both sides.
                self._buffer[target : target + page_bytes] = mapping.view[
                    source : source + page_bytes
                ]
            byte_count += page_bytes * len(part.source_ids)
        return byte_count

    def _forget(self, key: _PoolKey) -> None:
        self._failures.pop(key, None)
        mapping = self._mappings.pop(key, None)
        if mapping is not None:
            mapping.close()


def _map_read_only(handle: PoolHandle) -> mmap.mmap:
    if handle.transport != TRANSPORT:
        raise _Unreachable(f"its transport is {handle.transport!r}, not {TRANSPORT!r}")
    pid, _, fd = handle.address.partition(":")
    if not (pid.isdecimal() and fd.isdecimal()):
        raise _Unreachable(f"its address is {handle.address!r}, not PID:FD")
    path = f"/proc/{pid}/fd/{fd}"
    # A process id that was given out anew must not make us map some other file.
    name = os.readlink(path)
    if not name.startswith(MEMFD_PREFIX):
        raise _Unreachable(f"{path} is not a memfd")
    own_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(own_fd).st_size
        if size < handle.byte_count:
            raise _Unreachable(f"{path} has {size} bytes, not {handle.byte_count}")
        # Populated at once: page faults would make the first copies several times slower.
        return mmap.mmap(own_fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
    finally:
        os.close(own_fd)
