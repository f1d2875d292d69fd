"""Two movers in one process and what they say, for tests of connectors and of the mover."""

from __future__ import annotations

import contextlib
import queue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pdserve_kv_transfer.events import Connected, RegionOpened
from pdserve_kv_transfer.mover import Mover
from pdserve_kv_transfer.ucx import configure_ucx

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt
    from pdserve_kv_transfer.connector import Connector
    from pdserve_kv_transfer.wire import Wire
    from pdserve_protocol.handoff import Region

E = TypeVar("E")

NUM_BLOCKS = 16
WAIT_S = 20.0


def cache_of(num_blocks: int, block_bytes: int, seed: int | None = None) -> npt.NDArray[np.uint8]:
    """uint8 [num_blocks, block_bytes], zeros or random bytes."""
    if seed is None:
        return np.zeros((num_blocks, block_bytes), dtype=np.uint8)
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)


class Inbox:
    """Where a mover posts its events."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()

    def put(self, event: object) -> None:
        self._queue.put(event)

    def next(self, timeout_s: float = WAIT_S) -> object:
        return self._queue.get(timeout=timeout_s)

    def expect(self, kind: type[E]) -> E:
        """The next event, which must be of this kind."""
        event = self.next()
        assert isinstance(event, kind), event
        return event


class MoverPair:
    """A sender with random blocks and a receiver with zeros."""

    def __init__(
        self,
        connector: str,
        block_bytes: int,
        connectors: Mapping[str, Connector] | None,
        wire: Wire | None = None,
        secret: str | None = None,
    ) -> None:
        self.connector = connector
        self.wire = wire
        self.source = cache_of(NUM_BLOCKS, block_bytes, seed=1)
        self.target = cache_of(NUM_BLOCKS, block_bytes)
        self.sent = Inbox()
        self.received = Inbox()
        common: dict[str, Any] = {"connectors": connectors, "region_bytes": 4 * block_bytes, "secret": secret}
        self.sender = Mover(self.source, self.sent.put, **common)
        self.receiver = Mover(self.target, self.received.put, **common)

    def open_region(self, peer: str = "p") -> Region:
        self.receiver.open_region(peer, self.connector, self.wire)
        return self.received.expect(RegionOpened).region

    def connect(self, peer: str = "p", key: str = "d") -> Region:
        """A region for ``peer``, and the sender connected to it as ``key``."""
        region = self.open_region(peer)
        self.sender.connect(key, self.connector, region, self.wire)
        self.sent.expect(Connected)
        return region


@contextlib.contextmanager
def mover_pair(
    connector: str,
    block_bytes: int,
    connectors: Mapping[str, Connector] | None = None,
    wire: Wire | None = None,
    secret: str | None = None,
) -> Iterator[MoverPair]:
    configure_ucx("127.0.0.1")
    pair = MoverPair(connector, block_bytes, connectors, wire, secret)
    try:
        yield pair
    finally:
        assert pair.sender.close()
        assert pair.receiver.close()
