"""The landing zone: memory that one peer may write.

Knows bytes only. What may be written when is the Receiver's business; who can reach the memory is the connector's; what
is taken out of it, and how it is verified, is the codec's.

Letters: S slots of the region, B bytes of a block.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class LandingZone:
    """One peer's region: page-aligned anonymous memory of its own, uint8 [num_slots, block_bytes]."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        # Shared memory, mmap's default, would keep its pages when it is abandoned.
        self._map = mmap.mmap(-1, num_slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # The kernel pins the pages for every write from another process: large ones are 512 times fewer.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory_SB: npt.NDArray[np.uint8] = np.frombuffer(
            self._map, dtype=np.uint8, count=num_slots * block_bytes
        ).reshape(num_slots, block_bytes)

    @property
    def num_slots(self) -> int:
        return int(self.memory_SB.shape[0])

    @property
    def slot_bytes(self) -> int:
        return int(self.memory_SB.shape[1])

    @property
    def num_bytes(self) -> int:
        return int(self.memory_SB.nbytes)

    def abandon(self) -> None:
        """Gives the pages back. The addresses stay reserved as long as this object lives: late writes hit nothing."""
        self._map.madvise(mmap.MADV_DONTNEED)
