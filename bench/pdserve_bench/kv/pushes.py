"""What is measured: writes of a connector by themselves, and pushes through the mover of a node.

Blocks and slots lie apart, so that none travels together with a neighbour: the hardest case for a connector.
"""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING

import numpy as np
from pdserve_kv_transfer.digest import DIGEST_NAME
from pdserve_kv_transfer.events import Connected, Written
from pdserve_kv_transfer.mover import Mover
from pdserve_kv_transfer.pages import map_large
from pdserve_kv_transfer.wire import NUMBERS, Wire, block_bytes
from pdserve_protocol.node import KVLayout

if TYPE_CHECKING:
    import numpy.typing as npt
    from pdserve_kv_transfer.connector import Connector, SourceConnector
    from pdserve_kv_transfer.events import MoverEvent
    from pdserve_protocol.handoff import Region

    from pdserve_bench.kv.config import Point

PAUSE_S = 20e-6
WAIT_S = 30.0
HEAD_DIM = 64
ROW_BYTES = 2 * HEAD_DIM * 2
"""K and V of one token, bf16: a block has a whole number of them."""


def cache_of(block_size: int, num_blocks: int) -> npt.NDArray[np.uint8]:
    """uint8 [2 * num_blocks, block_size] of random bf16 numbers: blocks, and a gap after each."""
    numbers = np.random.default_rng(0).standard_normal(2 * num_blocks * block_size // 2, dtype=np.float32)
    return in_large_pages((numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)).reshape(-1, block_size)


def in_large_pages(data_B: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy, in memory as a node's cache has it."""
    _, copy_B = map_large(data_B.size)
    copy_B[:] = data_B
    return copy_B


def pieces_of(point: Point) -> list[list[tuple[int, int]]]:
    """(block, slot) of each write of the point."""
    order = 2 * np.random.default_rng(1).permutation(point.total_blocks)
    pieces = [(int(block), 2 * slot) for slot, block in enumerate(order)]
    return [pieces[index :: point.concurrency] for index in range(point.concurrency)]


class ConnectorPush:
    """Writes and polls, and nothing else."""

    def __init__(self, source: SourceConnector, peer: str, point: Point) -> None:
        self._source = source
        self._peer = peer
        self._pieces = pieces_of(point)

    def measure(self) -> float:
        """Seconds from the first write to the end of the last."""
        start = time.perf_counter()
        handles = [self._source.write(self._peer, pieces) for pieces in self._pieces]
        while True:
            handles = [handle for handle in handles if not self._source.poll(handle)]
            if not handles:
                return time.perf_counter() - start
            time.sleep(PAUSE_S)


class MoverPush:
    """What a node does: packing where the wire wants it, digests, writes, and the mover's own pauses."""

    def __init__(
        self, cache_NB: npt.NDArray[np.uint8], connector: Connector, region: Region, wire: Wire | None
    ) -> None:
        self._events: queue.SimpleQueue[MoverEvent] = queue.SimpleQueue()
        # The region of this mover's own peers is not used.
        region_bytes = 4 * max(cache_NB.shape[1], region.slot_bytes)
        self._mover = Mover(cache_NB, self._events.put, connectors={"measured": connector}, region_bytes=region_bytes)
        self._mover.connect("peer", "measured", region, wire)
        event = self._events.get(timeout=WAIT_S)
        if not isinstance(event, Connected):
            raise ConnectionError(str(event))

    def measure(self, point: Point) -> float:
        """Seconds from the first command to the last event."""
        writes = pieces_of(point)
        start = time.perf_counter()
        for number, pieces in enumerate(writes):
            self._mover.write("peer", f"r{number}", [(index, *piece) for index, piece in enumerate(pieces)])
        num_left = point.total_blocks
        while num_left:
            event = self._events.get(timeout=WAIT_S)
            if not isinstance(event, Written):
                raise ConnectionError(str(event))
            num_left -= len(event.digests)
        return time.perf_counter() - start

    def close(self) -> None:
        self._mover.close()


def wire_of(block_size: int, dtype: str) -> Wire:
    """A wire between bf16 caches of one KV head and layer."""
    layout = KVLayout(
        block_size=block_size // ROW_BYTES,
        num_layers=1,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
        block_bytes=block_size,
    )
    number = NUMBERS["bfloat16" if dtype == "auto" else dtype]
    assert block_bytes(layout, NUMBERS["bfloat16"]) == block_size, "options have been checked"
    return Wire(source=layout, target=layout, number=number, digest=DIGEST_NAME, sealed=False, context=b"bench")
