from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from pdserve_engine.block_pool import BlockPool, PoolCounts


def named(pool: BlockPool, *names: bytes) -> list[int]:
    blocks = pool.allocate(len(names))
    assert blocks is not None
    for block, name in zip(blocks, names, strict=True):
        pool.cache(block, name)
    return blocks


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.counts() == PoolCounts(total=4, free=4, cached=0, in_use=0)
    blocks = pool.allocate(4)
    assert blocks is not None
    assert sorted(blocks) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_freed_block_with_a_name_stays_findable_until_evicted() -> None:
    pool = BlockPool(2)
    (block,) = named(pool, b"a")
    pool.free([block])
    assert pool.counts() == PoolCounts(total=2, free=1, cached=1, in_use=0)
    assert pool.lookup(b"a") == block
    pool.touch([block])
    assert pool.ref_count(block) == 1
    assert pool.allocate(2) is None
    pool.free([block])
    assert pool.allocate(2) is not None
    assert pool.lookup(b"a") is None


def test_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    pool.free(named(pool, b"1", b"2", b"3"))
    pool.allocate(1)
    assert [pool.lookup(name) is not None for name in (b"1", b"2", b"3")] == [True, True, False]
    pool.allocate(1)
    assert pool.lookup(b"1") is not None


def test_least_recently_used_is_evicted_first() -> None:
    pool = BlockPool(2)
    (old,) = named(pool, b"old")
    pool.free([old])
    (young,) = named(pool, b"young")
    pool.free([young])
    pool.touch([old])
    pool.free([old])
    pool.allocate(1)
    assert pool.lookup(b"young") is None
    assert pool.lookup(b"old") == old


def test_second_block_with_the_same_content_is_not_indexed() -> None:
    pool = BlockPool(2)
    first, second = named(pool, b"a", b"a")
    assert pool.lookup(b"a") == first
    pool.free([second])
    assert pool.counts() == PoolCounts(total=2, free=1, cached=0, in_use=1)
    pool.free([first])
    assert pool.counts() == PoolCounts(total=2, free=1, cached=1, in_use=0)


def test_allocation_after_hits_never_evicts_the_hits() -> None:
    pool = BlockPool(3)
    hits = named(pool, b"1", b"2")
    pool.free(hits)
    assert pool.allocate_after(hits, 2) is None
    assert pool.counts() == PoolCounts(total=3, free=1, cached=2, in_use=0)
    blocks = pool.allocate_after(hits, 1)
    assert blocks is not None
    assert not set(blocks) & set(hits)
    assert pool.counts().in_use == 3


def test_reset_forgets_what_nobody_uses() -> None:
    pool = BlockPool(3)
    used, unused = named(pool, b"used", b"unused")
    pool.free([unused])
    assert pool.reset_prefix_cache() == (1, 1)
    assert pool.lookup(b"unused") is None
    assert pool.lookup(b"used") == used
    assert pool.counts() == PoolCounts(total=3, free=2, cached=0, in_use=1)


def test_double_free_is_noticed() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(AssertionError, match="not used"):
        pool.free(blocks)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("afts"), st.integers(0, 7)), max_size=60))
def test_counts_and_index_hold_after_any_history(moves: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    tables: list[list[int]] = []
    for move, number in moves:
        if move == "a" and (blocks := pool.allocate(number % 4)) is not None:
            for block in blocks:
                if (number + block) % 2:
                    pool.cache(block, bytes([number, block % 3]))
            tables.append(blocks)
        elif move == "f" and tables:
            pool.free(tables.pop(number % len(tables)))
        elif move == "t" and (hit := pool.lookup(bytes([number, number % 3]))) is not None:
            pool.touch([hit])
            tables.append([hit])
        elif move == "s":
            pool.reset_prefix_cache()
        references = [sum(table.count(block) for table in tables) for block in range(6)]
        assert [pool.ref_count(block) for block in range(6)] == references
        counts = pool.counts()
        assert counts.free + counts.cached + counts.in_use == counts.total
        assert counts.in_use == sum(count > 0 for count in references)
