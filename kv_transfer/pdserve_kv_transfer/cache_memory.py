"""The KV cache as packing and landing see it: bytes of blocks in host memory, wherever the cache itself lies.

Blocks of a cache on the CPU are used in place. Those of a device are copied to the host to be packed and back once they
have landed, so that digests, conversions and seals are the same for all, and every connector carries them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes: TypeAlias = npt.NDArray[np.uint8]
    Cache: TypeAlias = "Bytes | DeviceCache"


class DeviceCache(Protocol):
    """A KV cache in the memory of a device. Each copy has ended when its call returns; one thread calls.

    Attributes:
        shape: (num_blocks, block_bytes).
        scratch_B: memory of the host for one block, from and to which copies are fast.
    """

    shape: tuple[int, int]
    scratch_B: Bytes

    def read(self, block: int, into_B: Bytes) -> None:
        """Copies a block, which no step writes to, to host memory."""
        ...

    def write(self, block: int, from_B: Bytes) -> None:
        """Copies host memory to a block that no step uses."""
        ...

    def pin(self, memory: Bytes) -> None:
        """Makes copies to and from this memory fast, for as long as the process lives. Raises CannotPin."""
        ...


class HostBlocks(Protocol):
    """Blocks as host memory. What ``read`` and ``blank`` return is valid until the next call."""

    in_place: bool

    def read(self, block: int, into_B: Bytes | None = None) -> Bytes:
        """The bytes of a block; those of a device are copied into ``into_B`` where that is given."""
        ...

    def blank(self, block: int) -> Bytes:
        """Memory for new bytes of a block, all of which are to be written; what is in it means nothing."""
        ...

    def store(self, block: int) -> None:
        """Makes what was written to the memory of the last ``read`` or ``blank`` the block's bytes."""
        ...


def host_blocks(cache: Cache) -> HostBlocks:
    return _InPlace(cache) if isinstance(cache, np.ndarray) else _Copied(cache)


class _InPlace:
    in_place = True

    def __init__(self, cache_NB: Bytes) -> None:
        self._cache_NB = cache_NB

    def read(self, block: int, into_B: Bytes | None = None) -> Bytes:
        block_B: Bytes = self._cache_NB[block]
        return block_B

    def blank(self, block: int) -> Bytes:
        block_B: Bytes = self._cache_NB[block]
        return block_B

    def store(self, block: int) -> None:
        pass


class _Copied:
    in_place = False

    def __init__(self, cache: DeviceCache) -> None:
        self._cache = cache

    def read(self, block: int, into_B: Bytes | None = None) -> Bytes:
        into_B = self._cache.scratch_B if into_B is None else into_B
        self._cache.read(block, into_B)
        return into_B

    def blank(self, block: int) -> Bytes:
        return self._cache.scratch_B

    def store(self, block: int) -> None:
        self._cache.write(block, self._cache.scratch_B)
