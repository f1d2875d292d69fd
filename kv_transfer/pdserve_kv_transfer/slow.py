"""A connector that holds writes back, around any other one: for tests and drills of what happens meanwhile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdserve_kv_transfer.connector import Connector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt
    from pdserve_protocol.handoff import Region

    from pdserve_kv_transfer.connector import SourceConnector


class SlowSource:
    """Starts each write of ``inner`` ``delay_s`` after it was asked for, and not before ``gate()`` is true."""

    def __init__(
        self, inner: SourceConnector, *, delay_s: float = 0.0, gate: Callable[[], bool] = lambda: True
    ) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self._gate = gate
        self._handles = 0
        self._waiting: dict[int, tuple[float, str, Sequence[tuple[int, int]]]] = {}
        self._started: dict[int, int] = {}

    def connect(self, peer: str, region: Region) -> Future[None] | None:
        return self._inner.connect(peer, region)

    def write(self, peer: str, pieces: Sequence[tuple[int, int]]) -> int:
        self._handles += 1
        self._waiting[self._handles] = (time.monotonic() + self._delay_s, peer, pieces)
        return self._handles

    def poll(self, handle: int) -> bool:
        waiting = self._waiting.get(handle)
        if waiting is not None:
            due_at, peer, pieces = waiting
            if time.monotonic() < due_at or not self._gate():
                return False
            del self._waiting[handle]
            self._started[handle] = self._inner.write(peer, pieces)
        ended = self._inner.poll(self._started[handle])
        if ended:
            del self._started[handle]
        return ended

    def abandon(self, handle: int) -> None:
        self._waiting.pop(handle, None)
        started = self._started.pop(handle, None)
        if started is not None:
            self._inner.abandon(started)

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)

    def close(self) -> None:
        self._inner.close()


def slow(connector: Connector, *, delay_s: float = 0.0, gate: Callable[[], bool] = lambda: True) -> Connector:
    """``connector`` with its writes held back."""

    def source(cache_NB: npt.NDArray[np.uint8]) -> SourceConnector:
        return SlowSource(connector.source(cache_NB), delay_s=delay_s, gate=gate)

    return Connector(source=source, target=connector.target)
