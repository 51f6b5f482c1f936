"""The tensors behind page ids: one buffer for a worker's pool, on the CPU or on a GPU.

On the CPU the buffer is a memfd, which other processes of the same user may map read-only
while its owner lives; nothing is left behind when the owner dies. The bytes lie as
`kvcache/geometry.py` says.
"""

import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from tidegate.ipc.protocol import PoolHandle
from tidegate.kvcache.geometry import Geometry, geometry
from tidegate.kvcache.layout import Layout

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_MAP_BYTES_MIN = 4096  # An empty file cannot be mapped.


class PageStore:
    """All pages of all groups of `layout`; group i has `page_counts[i]` of them, zeroed.

    Raises `OSError` if the memory cannot be had, and `ValueError` for a device that is
    neither "cpu" nor "cuda…".
    """

    def __init__(
        self, layout: Layout, page_counts: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self.geometry: Geometry = geometry(layout, page_counts)
        self._fd: int | None = None
        self._map: mmap.mmap | None = None
        byte_count = max(self.geometry.byte_count, _MAP_BYTES_MIN)
        if self.device.type == "cpu":
            self._fd = os.memfd_create("tidegate-pool", os.MFD_CLOEXEC)
            # A store that is dropped and not closed keeps no descriptor either.
            self._close_fd = weakref.finalize(self, os.close, self._fd)
            # All of it is taken now: a pool that the machine cannot hold fails here, and not
            # when requests have been accepted against it.
            os.posix_fallocate(self._fd, 0, byte_count)
            self._map = mmap.mmap(self._fd, byte_count, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        elif self.device.type == "cuda":
            self._bytes = torch.zeros(byte_count, dtype=torch.uint8, device=self.device)
        else:
            raise ValueError(f"device is {device}: it must be cpu or cuda")
        self._tensors = tuple(
            tuple(self._view(group, index) for index in range(len(spec.tensors)))
            for group, spec in enumerate(layout.groups)
        )

    def tensor(self, group: int, index: int) -> torch.Tensor:
        """Tensor `index` of a group: [page_count, page_tokens // tokens_per_entry, *shape].

        A view whose pages are strided and whose inner dimensions are contiguous.
        """
        return self._tensors[group][index]

    @property
    def buffer(self) -> memoryview:
        """The pool's bytes, writable. Only on the CPU: raises `ValueError` elsewhere.

        Release it before `close`, or the memory stays mapped.
        """
        if self._map is None:
            raise ValueError(f"a pool on {self.device} has no buffer that the CPU can write")
        return memoryview(self._map)

    def handle(self) -> PoolHandle:
        """How other processes reach this pool.

        A GPU's pool has the transport "none": no other process can reach it.
        """
        transport, address = "none", ""
        if self._fd is not None:
            transport, address = "shared_memory", f"{os.getpid()}:{self._fd}"
        return PoolHandle(
            transport=transport,
            address=address,
            byte_count=self.geometry.byte_count,
            page_counts=self.geometry.page_counts,
        )

    def poison(self, group: int, ids: Sequence[int]) -> None:
        """Fill these pages with NaN, so that whoever still reads them is found out."""
        rows = torch.tensor(list(ids), dtype=torch.int64, device=self.device)
        for tensor in self._tensors[group]:
            tensor.index_fill_(0, rows, torch.nan)

    def close(self) -> None:
        """Give the memory back, once the last view of it is gone too. Idempotent."""
        self._tensors = ()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._map = None
        if self._fd is not None:
            self._close_fd()
            self._fd = None

    def _view(self, group: int, index: int) -> torch.Tensor:
        spec = self.layout.groups[group]
        tensor = spec.tensors[index]
        start = self.geometry.group_offsets[group]
        page_bytes = self.geometry.page_bytes[group]
        count = self.geometry.page_counts[group]
        pages = self._bytes[start : start + count * page_bytes].view(count, page_bytes)
        sizes = [other.entry_bytes * spec.entry_count(other) for other in spec.tensors]
        first = sum(sizes[:index])
        part = pages[:, first : first + sizes[index]].view(TORCH_DTYPES[tensor.dtype])
        return part.view(count, spec.entry_count(tensor), *tensor.shape)
