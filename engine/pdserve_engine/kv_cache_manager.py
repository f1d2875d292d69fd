"""KVCacheManager: which blocks a request has, and which of its tokens are already cached.

Owns the block table of every request. Knows nothing of the order in which requests are served, nor of tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_engine.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve_engine.block_hash import BlockHasher
    from pdserve_engine.request import Request


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """Blocks by state; free + cached + held + in_use = total.

    Attributes:
        cached: nobody's, reusable.
        held: kept for a hand-off only.
        in_use: of requests that are running or wait with blocks.
    """

    total: int
    free: int
    cached: int
    held: int
    in_use: int


class KVCacheManager:
    """Block tables over one BlockPool.

    Args:
        hasher: names full blocks; None turns prefix caching off.
    """

    def __init__(self, num_blocks: int, block_size: int, hasher: BlockHasher | None) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._hasher = hasher
        self._tables: dict[str, list[int]] = {}
        self._num_named: dict[str, int] = {}
        self._retained: Counter[int] = Counter()

    @property
    def capacity_tokens(self) -> int:
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request_id: str, start: int = 0) -> list[int]:
        """Blocks of a request by their index in the sequence, from index ``start`` on; empty where it has none."""
        return self._tables.get(request_id, [])[start:]

    def num_blocks(self, request_id: str) -> int:
        """How many blocks a request has."""
        return len(self._tables.get(request_id, ()))

    def find_cached(self, request: Request, num_tokens: int) -> list[int]:
        """Cached blocks that hold the beginning of the request, as far as the first ``num_tokens`` tokens go.

        Nothing is pinned: pass them to ``allocate`` at once.
        """
        hits: list[int] = []
        if self._hasher is None:
            return hits
        for block_hash in self._hasher.extend(request, num_tokens // self.block_size):
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate(self, request: Request, num_tokens: int, hits: Sequence[int] = ()) -> bool:
        """Gives a request without blocks room for ``num_tokens`` tokens, beginning with ``hits``. All or nothing."""
        assert request.request_id not in self._tables, f"request {request.request_id} has blocks"
        blocks = self.pool.allocate_after(hits, self.blocks_for(num_tokens) - len(hits))
        if blocks is None:
            return False
        self._tables[request.request_id] = [*hits, *blocks]
        self._num_named[request.request_id] = len(hits)
        return True

    def append(self, request: Request, num_tokens: int) -> bool:
        """Makes room for ``num_tokens`` tokens in all. All or nothing."""
        table = self._tables[request.request_id]
        if num_tokens <= len(table) * self.block_size:
            return True
        blocks = self.pool.allocate(self.blocks_for(num_tokens) - len(table))
        if blocks is None:
            return False
        table.extend(blocks)
        return True

    def detach(self, request_id: str) -> list[int]:
        """Forgets a request without freeing its blocks, which the caller now owns; empty where it has none."""
        self._num_named.pop(request_id, None)
        return self._tables.pop(request_id, [])

    def free(self, request_id: str) -> None:
        """Forgets a request and frees its blocks; nothing happens where it has none."""
        self.pool.free(self.detach(request_id))

    def rename(self, old_id: str, new_id: str) -> None:
        """The request has another id from now on."""
        if old_id in self._tables:
            self._tables[new_id] = self._tables.pop(old_id)
            self._num_named[new_id] = self._num_named.pop(old_id)

    def cache_computed(self, request: Request) -> None:
        """Lets the full blocks of the request's computed tokens be found. Only retired steps count as computed."""
        if self._hasher is None:
            return
        num_named = self._num_named[request.request_id]
        num_full = request.num_computed_tokens // self.block_size
        if num_full <= num_named:
            return
        table = self._tables[request.request_id]
        hashes = self._hasher.extend(request, num_full)
        for index in range(num_named, num_full):
            self.pool.cache(table[index], hashes[index])
        self._num_named[request.request_id] = num_full

    def retain(self, blocks: Sequence[int]) -> None:
        """Keeps used blocks from being reused while something outside the steps reads or writes them."""
        self.pool.touch(blocks)
        self._retained.update(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Ends a ``retain``."""
        self._retained.subtract(blocks)
        self._retained += Counter()
        self.pool.free(blocks)

    def usage(self, held_request_ids: Iterable[str] = ()) -> BlockUsage:
        """Blocks by state, given the requests that keep theirs for a hand-off only."""
        references = Counter(self._retained)
        for request_id in held_request_ids:
            references.update(self._tables.get(request_id, ()))
        held = sum(self.pool.ref_count(block) == count for block, count in references.items())
        counts = self.pool.counts()
        return BlockUsage(
            total=counts.total, free=counts.free, cached=counts.cached, held=held, in_use=counts.in_use - held
        )
