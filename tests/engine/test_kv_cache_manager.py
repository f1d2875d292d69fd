from __future__ import annotations

from pdserve_engine.block_hash import BlockHasher
from pdserve_engine.kv_cache_manager import BlockUsage, KVCacheManager
from pdserve_engine.request import Request
from pdserve_protocol.sampling import SamplingParams


def manager(num_blocks: int = 8) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, BlockHasher("m", 4, b"k"))


def request(request_id: str, num_tokens: int) -> Request:
    return Request(request_id=request_id, prompt_token_ids=list(range(num_tokens)), sampling=SamplingParams())


def test_only_computed_full_blocks_can_be_found() -> None:
    # B21: a block can be matched only once it is written.
    kv, writer, reader = manager(), request("w", 12), request("r", 12)
    assert kv.allocate(writer, 13)
    assert kv.find_cached(reader, 12) == []
    kv.cache_computed(writer)
    assert kv.find_cached(reader, 12) == []
    writer.num_computed_tokens = 7
    kv.cache_computed(writer)
    assert kv.find_cached(reader, 12) == kv.block_ids("w")[:1]
    writer.num_computed_tokens = 12
    kv.cache_computed(writer)
    assert kv.find_cached(reader, 12) == kv.block_ids("w")[:3]
    assert kv.find_cached(reader, 11) == kv.block_ids("w")[:2]


def test_a_hole_ends_the_prefix() -> None:
    kv, writer, reader = manager(4), request("w", 16), request("r", 16)
    assert kv.allocate(writer, 16)
    writer.num_computed_tokens = 16
    kv.cache_computed(writer)
    blocks = kv.block_ids("w")
    kv.free("w")
    kv.pool.touch(blocks[:1] + blocks[2:])
    kv.pool.allocate(1)
    assert kv.find_cached(reader, 16) == blocks[:1]


def test_requests_share_hits_and_the_last_one_frees() -> None:
    kv, writer, reader = manager(), request("w", 8), request("r", 8)
    assert kv.allocate(writer, 9)
    writer.num_computed_tokens = 8
    kv.cache_computed(writer)
    assert kv.allocate(reader, 9, kv.find_cached(reader, 8))
    assert kv.block_ids("r")[:2] == kv.block_ids("w")[:2]
    kv.free("w")
    assert kv.usage().in_use == 3
    kv.free("r")
    assert kv.usage() == BlockUsage(total=8, free=6, cached=2, held=0, in_use=0)


def test_held_are_blocks_that_nobody_else_uses() -> None:
    kv, holder, reader = manager(), request("h", 8), request("r", 8)
    assert kv.allocate(holder, 9)
    holder.num_computed_tokens = 8
    kv.cache_computed(holder)
    assert kv.usage(["h"]) == BlockUsage(total=8, free=5, cached=0, held=3, in_use=0)
    assert kv.allocate(reader, 9, kv.find_cached(reader, 8)[:1])
    assert kv.usage(["h"]) == BlockUsage(total=8, free=3, cached=0, held=2, in_use=3)


def test_retained_blocks_outlive_their_request() -> None:
    kv, one = manager(2), request("a", 8)
    assert kv.allocate(one, 8)
    blocks = kv.block_ids("a")
    kv.retain(blocks[:1])
    kv.free("a")
    assert kv.usage() == BlockUsage(total=2, free=1, cached=0, held=1, in_use=0)
    assert not kv.allocate(request("b", 8), 8)
    kv.release(blocks[:1])
    assert kv.allocate(request("b", 8), 8)


def test_without_prefix_caching_nothing_is_found() -> None:
    kv, writer = KVCacheManager(8, 4, None), request("w", 8)
    assert kv.allocate(writer, 9)
    writer.num_computed_tokens = 8
    kv.cache_computed(writer)
    assert kv.find_cached(request("r", 8), 8) == []
    kv.free("w")
    assert kv.usage().free == 8
