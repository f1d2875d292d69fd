"""BlockPool: the KV blocks of a node, who uses them, and which can be found again by their hash.

Owns reference counts, the hash index and the order of eviction. Knows nothing of requests, tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; free + cached + in_use = total.

    Attributes:
        free: without content.
        cached: used by nobody, but found by their hash.
        in_use: used at least once.
    """

    total: int
    free: int
    cached: int
    in_use: int


class BlockPool:
    """``num_blocks`` blocks, named 0 to num_blocks - 1. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_allocatable(self) -> int:
        return len(self._free) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this content, used or not; None where there is none."""
        return self._by_hash.get(block_hash)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes blocks, each with one reference: free ones first, then the least recently used cached ones.

        All or nothing: None, and nothing changed, where there are not enough.
        """
        if num_blocks > self.num_allocatable:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def allocate_after(self, hits: Sequence[int], num_blocks: int) -> list[int] | None:
        """Touches ``hits`` and allocates ``num_blocks`` more, all or nothing; the new ones are returned."""
        num_unused_hits = sum(self._ref_counts[block] == 0 for block in hits)
        if num_blocks > self.num_allocatable - num_unused_hits:
            return None
        self.touch(hits)
        return self.allocate(num_blocks)

    def touch(self, blocks: Sequence[int]) -> None:
        """Adds a reference to blocks that are in use or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one reference each, last block first, so that the end of a sequence is evicted before its beginning."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} is freed but not used"
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def cache(self, block: int, block_hash: bytes) -> None:
        """Lets a used, fully written block be found by its hash.

        A second block with the same content is not indexed: it becomes free when its last user frees it.
        """
        assert self._ref_counts[block] > 0, f"block {block} is named but not used"
        assert self._hashes[block] is None, f"block {block} has a name"
        if block_hash in self._by_hash:
            return
        self._by_hash[block_hash] = block
        self._hashes[block] = block_hash

    def reset_prefix_cache(self) -> tuple[int, int]:
        """Forgets all cached blocks: (forgotten, left because they are in use)."""
        num_forgotten = len(self._cached)
        self._free.extend(self._evict() for _ in range(num_forgotten))
        return num_forgotten, len(self._by_hash)

    def counts(self) -> PoolCounts:
        free, cached = len(self._free), len(self._cached)
        return PoolCounts(total=self.num_blocks, free=free, cached=cached, in_use=self.num_blocks - free - cached)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hashes[block] = None
        return block
