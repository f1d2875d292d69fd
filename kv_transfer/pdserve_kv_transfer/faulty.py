"""A connector whose writes go wrong by a seed, around any other one: for tests and drills."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_kv_transfer.connector import Connector
from pdserve_kv_transfer.errors import RegionUnreachable, TransferError, WriteFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt
    from pdserve_protocol.handoff import Region

    from pdserve_kv_transfer.connector import SourceConnector
    from pdserve_kv_transfer.faults import Faults

REORDER_S = 0.05


@dataclass(slots=True)
class _Write:
    """A write that was asked for. ``inner``: its handle once it has started, 0 where nothing is left of it."""

    peer: str
    pieces: list[tuple[int, int]]
    due_at: float
    overtaken_by: int | None = None
    stalls: bool = False
    fails: bool = False
    doubles: bool = False
    inner: int | None = None


class FaultySource:
    """Writes through ``inner``, badly. ``now``: a clock that rises."""

    def __init__(
        self, inner: SourceConnector, num_blocks: int, faults: Faults, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._num_blocks = num_blocks
        self._faults = faults
        self._now = now
        self._random = random.Random(faults.seed)
        self._peers: set[str] = set()
        self._writes: dict[int, _Write] = {}
        self._again: list[tuple[str, int]] = []
        self._handles = itertools.count(1)
        self._num_started = 0

    def connect(self, peer: str, region: Region) -> Future[None] | None:
        reached = self._inner.connect(peer, region)
        self._peers.add(peer)
        return reached

    def write(self, peer: str, pieces: Sequence[tuple[int, int]]) -> int:
        if peer not in self._peers:
            raise RegionUnreachable(peer, "it is not connected")
        faults = self._faults
        write = _Write(peer, self._spoil(pieces), due_at=self._now() + self._random.uniform(0.0, faults.delay_ms / 1e3))
        if self._happens(faults.reorder):
            write.overtaken_by = self._num_started + 1
            write.due_at += REORDER_S
        write.stalls = self._happens(faults.stall)
        write.fails = self._happens(faults.fail)
        write.doubles = self._happens(faults.double)
        handle = next(self._handles)
        self._writes[handle] = write
        if self._is_due(write):
            self._start(handle, write)
        return handle

    def poll(self, handle: int) -> bool:
        self._poll_again()
        write = self._writes[handle]
        if write.inner is None and self._is_due(write):
            self._start(handle, write)
        if write.inner is None:
            return False
        try:
            ended = not write.inner or self._inner.poll(write.inner)
        except TransferError:
            del self._writes[handle]
            raise
        if not ended:
            return False
        del self._writes[handle]
        if write.fails:
            raise WriteFault("as the drill wants")
        if write.doubles and write.pieces:
            # It may fail or not: nobody has asked for it.
            with suppress(TransferError):
                self._again.append((write.peer, self._inner.write(write.peer, write.pieces)))
        return True

    def abandon(self, handle: int) -> None:
        write = self._writes.pop(handle, None)
        if write is not None and write.inner:
            self._inner.abandon(write.inner)

    def disconnect(self, peer: str) -> None:
        self._peers.discard(peer)
        for again_peer, inner in self._again:
            if again_peer == peer:
                self._inner.abandon(inner)
        self._again = [one for one in self._again if one[0] != peer]
        self._inner.disconnect(peer)

    def close(self) -> None:
        self._peers.clear()
        self._again.clear()
        self._inner.close()

    def _happens(self, share: float) -> bool:
        return self._random.random() < share

    def _spoil(self, pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Without what is dropped, and with other blocks where they are corrupt."""
        kept = [piece for piece in pieces if not self._happens(self._faults.drop)]
        other = 1 + self._random.randrange(max(self._num_blocks - 1, 1))
        return [
            ((block + other) % self._num_blocks if self._happens(self._faults.corrupt) else block, slot)
            for block, slot in kept
        ]

    def _is_due(self, write: _Write) -> bool:
        if write.stalls:
            return False
        if write.overtaken_by is not None and self._num_started >= write.overtaken_by:
            return True
        return self._now() >= write.due_at

    def _start(self, handle: int, write: _Write) -> None:
        self._num_started += 1
        try:
            write.inner = self._inner.write(write.peer, write.pieces) if write.pieces else 0
        except TransferError:
            del self._writes[handle]
            raise

    def _poll_again(self) -> None:
        """Writes that are made a second time move on while others are polled."""
        under_way = []
        for peer, inner in self._again:
            with suppress(TransferError):
                if not self._inner.poll(inner):
                    under_way.append((peer, inner))
        self._again = under_way


def faulty(connector: Connector, faults: Faults) -> Connector:
    """``connector`` with writes that go wrong. Who is written to sees an ordinary one."""

    def source(cache_NB: npt.NDArray[np.uint8]) -> SourceConnector:
        return FaultySource(connector.source(cache_NB), len(cache_NB), faults)

    return Connector(source=source, target=connector.target)
