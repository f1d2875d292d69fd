"""Pages of the KV cache are made before requests need them, and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_engine import kv_memory
from pdserve_engine.oracle import oracle_layout
from pdserve_engine.process_memory import resident_bytes_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pytest


def cache_of(num_bytes: int) -> npt.NDArray[np.uint8]:
    layout = oracle_layout(16)
    return kv_memory.allocate(-(-num_bytes // layout.block_bytes), layout)


def test_all_pages_are_made_and_no_byte_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "free_memory", lambda: 8 << 30)
    cache = cache_of(9 << 20)
    cache[3] = 7
    cache[-1, -1] = 9
    kv_memory.make_pages(cache)
    assert resident_bytes_of(cache.ctypes.data, cache.nbytes) >= cache.nbytes
    assert (cache[3] == 7).all()
    assert cache[-1, -1] == 9
    assert int(cache.sum(dtype=int)) == 7 * cache.shape[1] + 9


def test_what_others_need_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "free_memory", lambda: 1 << 30)
    cache = cache_of(9 << 20)
    kv_memory.make_pages(cache)
    assert resident_bytes_of(cache.ctypes.data, cache.nbytes) == 0
