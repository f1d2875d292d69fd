"""What a node's process keeps in memory, and what it can give back. Linux with glibc; elsewhere it does nothing."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pdserve_kv_transfer.cache_memory import Cache

_STATM = Path("/proc/self/statm")
_libc = ctypes.CDLL(None)


class ProcessMemory:
    """Args:
    weight_bytes: of the model as it was loaded.
    cache: the KV cache; one on a device takes no memory here.
    """

    def __init__(self, weight_bytes: int, cache: Cache) -> None:
        self._weight_bytes = weight_bytes
        self._cache = cache if isinstance(cache, np.ndarray) else None

    def gauges(self) -> dict[str, float]:
        """Bytes that are resident now: all, of the KV cache, and beyond cache and weights."""
        resident = resident_bytes()
        cache = 0 if self._cache is None else resident_bytes_of(self._cache.ctypes.data, self._cache.nbytes)
        return {
            "memory_resident_bytes": resident,
            "memory_kv_cache_bytes": cache,
            "memory_beyond_bytes": max(resident - cache - self._weight_bytes, 0),
        }


def give_back() -> None:
    """Returns to the system what the allocator holds and nobody uses: loading a model leaves much of it."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def resident_bytes() -> int:
    """Of this process, shared pages included."""
    return int(_STATM.read_text().split()[1]) * mmap.PAGESIZE if _STATM.exists() else 0


def resident_bytes_of(address: int, size: int) -> int:
    """Of the pages that ``size`` bytes at ``address`` lie on."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(address + size - start) // mmap.PAGESIZE)
    is_there = np.zeros(num_pages, dtype=np.uint8)
    failed = _libc.mincore(
        ctypes.c_void_p(start), ctypes.c_size_t(num_pages * mmap.PAGESIZE), ctypes.c_void_p(is_there.ctypes.data)
    )
    return 0 if failed else int(np.count_nonzero(is_there & 1)) * mmap.PAGESIZE
