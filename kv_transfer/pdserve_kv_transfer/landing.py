"""The landing zone: memory that one peer may write, and the pass that takes verified blocks out of it.

Knows bytes only. What may be written when is the Receiver's business; who can reach the memory is the connector's.

Letters: S slots of the region, B bytes of a block.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from pdserve_kv_transfer.digest import block_digest

if TYPE_CHECKING:
    import numpy.typing as npt


class LandingZone:
    """One peer's region: page-aligned anonymous memory of its own, uint8 [num_slots, block_bytes]."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        # Shared memory, mmap's default, would keep its pages when it is abandoned.
        self._map = mmap.mmap(-1, num_slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory_SB: npt.NDArray[np.uint8] = np.frombuffer(
            self._map, dtype=np.uint8, count=num_slots * block_bytes
        ).reshape(num_slots, block_bytes)

    @property
    def num_slots(self) -> int:
        return int(self.memory_SB.shape[0])

    @property
    def slot_bytes(self) -> int:
        return int(self.memory_SB.shape[1])

    def land(self, slot: int, digest: bytes, block_B: npt.NDArray[np.uint8], scratch_B: npt.NDArray[np.uint8]) -> bool:
        """Copies the slot into ``block_B`` if the bytes are those that were sent; otherwise leaves it alone.

        The digest is taken of a private copy, made in ``scratch_B``, and the copy is what is used: a peer that still
        writes into the slot cannot change bytes between check and use.
        """
        np.copyto(scratch_B, self.memory_SB[slot])
        if block_digest(scratch_B) != digest:
            return False
        np.copyto(block_B, scratch_B)
        return True

    def abandon(self) -> None:
        """Gives the pages back. The addresses stay reserved as long as this object lives: late writes hit nothing."""
        self._map.madvise(mmap.MADV_DONTNEED)
