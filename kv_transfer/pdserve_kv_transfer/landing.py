"""The landing zone: memory that one peer may write.

Knows bytes only. What may be written when is the Receiver's business; who can reach the memory is the connector's; what
is taken out of it, and how it is verified, is the codec's.

Letters: S slots of the region, B bytes of a block.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from pdserve_kv_transfer.pages import map_large

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class LandingZone:
    """One peer's region: memory of its own, uint8 [num_slots, block_bytes].

    Raises:
        NoMemory: the system gives none.
    """

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self._map, memory_B = map_large(num_slots * block_bytes)
        self.memory_SB: npt.NDArray[np.uint8] = memory_B.reshape(num_slots, block_bytes)

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
        # Private memory: shared memory, mmap's default, would keep its pages.
        self._map.madvise(mmap.MADV_DONTNEED)
