"""The loopback connector: both halves in one process, a write is a memcpy. For tests and single-process use."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from pdserve_kv_transfer.connector import Connector
from pdserve_kv_transfer.errors import RegionUnreachable, RegionUnusable
from pdserve_kv_transfer.runs import runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from pdserve_protocol.handoff import Region

_PREFIX = b"loopback:"
_regions: dict[bytes, npt.NDArray[np.uint8]] = {}
_lock = threading.Lock()


class LoopbackSource:
    """Writes are done when ``write`` returns."""

    def __init__(self, cache_NB: npt.NDArray[np.uint8]) -> None:
        self._cache_NB = cache_NB
        self._peers: dict[str, bytes] = {}
        self._handles = 0

    def connect(self, peer: str, region: Region) -> None:
        if not region.metadata.startswith(_PREFIX):
            raise RegionUnusable(region.name, "it is not of the loopback connector")
        with _lock:
            if region.metadata not in _regions:
                raise RegionUnreachable(region.name, "it is not in this process")
        self._peers[peer] = region.metadata

    def write(self, peer: str, pieces: Sequence[tuple[int, int]]) -> int:
        with _lock:
            memory_SB = _regions.get(self._peers.get(peer, b""))
            if memory_SB is None:
                raise RegionUnreachable(peer, "it is fenced")
            for block, slot, length in runs(pieces):
                np.copyto(memory_SB[slot : slot + length], self._cache_NB[block : block + length])
        self._handles += 1
        return self._handles

    def poll(self, handle: int) -> bool:
        return True

    def abandon(self, handle: int) -> None:
        pass

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def close(self) -> None:
        self._peers.clear()


class LoopbackTarget:
    def __init__(self) -> None:
        self._names: set[str] = set()

    def open_region(self, name: str, memory_SB: npt.NDArray[np.uint8]) -> bytes:
        metadata = _PREFIX + name.encode()
        with _lock:
            _regions[metadata] = memory_SB
        self._names.add(name)
        return metadata

    def fence(self, name: str) -> None:
        self._names.discard(name)
        with _lock:
            _regions.pop(_PREFIX + name.encode(), None)

    def close(self) -> None:
        for name in list(self._names):
            self.fence(name)


LOOPBACK = Connector(source=LoopbackSource, target=LoopbackTarget)
