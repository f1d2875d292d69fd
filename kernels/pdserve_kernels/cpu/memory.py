"""Memory in large pages, whose addresses the processor finds faster; and what memory gives one core."""

from __future__ import annotations

import mmap

import torch

from pdserve_kernels.cpu import _native

_REGION = 64 << 20
_LINE = 64


class Arena:
    """Hands out zeroed memory from large regions that are never given back but with the last tensor over them."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], aligned to a cache line."""
        if self._used + size > len(self._region):
            self._region = large_pages(max(size, _REGION))
            self._used = 0
        taken = self._region[self._used : self._used + size]
        self._used += -(-size // _LINE) * _LINE
        return taken


def large_pages(size: int) -> torch.Tensor:
    """Zeroed uint8 [size]; it takes no memory before it is written to."""
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)


def read_bandwidth(size: int = 256 << 20, repeats: int = 5) -> float:
    """Bytes per second that one core reads from ``size`` bytes of memory; the best of ``repeats`` passes."""
    data = large_pages(size).fill_(1)
    return max(_native.read_bandwidth(data.data_ptr(), size) for _ in range(repeats))
