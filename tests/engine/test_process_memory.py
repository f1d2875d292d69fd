"""What a node says of its memory is what the system says."""

from __future__ import annotations

import mmap

import numpy as np
from pdserve_engine.process_memory import ProcessMemory, give_back, resident_bytes, resident_bytes_of

PAGE = mmap.PAGESIZE


def mapping(num_pages: int) -> np.ndarray:
    memory = mmap.mmap(-1, num_pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def test_pages_count_when_they_are_written_to() -> None:
    memory = mapping(64)
    address = memory.ctypes.data
    assert resident_bytes_of(address, memory.nbytes) == 0
    memory[PAGE * 3] = memory[PAGE * 5 + 7] = 1
    assert resident_bytes_of(address, memory.nbytes) == 2 * PAGE
    # Half pages are whole ones.
    assert resident_bytes_of(address + 3 * PAGE + 100, 2 * PAGE) == 2 * PAGE


def test_what_is_neither_cache_nor_weights() -> None:
    cache = mapping(1024)
    cache[: 512 * PAGE] = 1
    gauges = ProcessMemory(weight_bytes=1 << 20, cache=cache).gauges()
    assert gauges["memory_kv_cache_bytes"] == 512 * PAGE
    rest = gauges["memory_resident_bytes"] - gauges["memory_kv_cache_bytes"] - (1 << 20)
    assert gauges["memory_beyond_bytes"] == rest > 0


def test_freed_memory_goes_back() -> None:
    # Blocks too small for mappings of their own, and one that is kept, so that the heap cannot just shrink.
    blocks = [bytearray(100_000) for _ in range(1_000)]
    kept = blocks[-1]
    before = resident_bytes()
    del blocks
    give_back()
    assert resident_bytes() < before - 50_000_000
    assert len(kept) == 100_000
