"""The shard plan: every byte of every target shard is covered once, and by the right head (B10)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pdserve_kv_transfer.shards import heads_of, shard_plan

HEAD_BYTES = 3


@st.composite
def shardings(draw: st.DrawFn) -> tuple[int, int, int]:
    """Source shards, target shards, KV heads: each side cuts or replicates the heads evenly."""
    num_heads = draw(st.integers(1, 12))
    divisors = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
    counts = st.one_of(st.sampled_from(divisors), st.integers(1, 4).map(lambda times: times * num_heads))
    return draw(counts), draw(counts), num_heads


def block_of_shard(shard: int, num_shards: int, num_heads: int) -> np.ndarray:
    """Every byte names its head and its place in it."""
    rows = [[10 * head + byte for byte in range(HEAD_BYTES)] for head in heads_of(shard, num_shards, num_heads)]
    return np.array(rows, dtype=np.int64).reshape(-1)


@settings(max_examples=200, deadline=None)
@given(shardings())
def test_every_byte_is_covered_once_from_the_right_head(case: tuple[int, int, int]) -> None:
    # B10: shard counts differ and heads are replicated.
    num_sources, num_targets, num_heads = case
    sources = [block_of_shard(shard, num_sources, num_heads) for shard in range(num_sources)]
    expected = [block_of_shard(shard, num_targets, num_heads) for shard in range(num_targets)]
    landed = [np.full(len(block), -1) for block in expected]
    for run in shard_plan(num_sources, num_targets, num_heads, HEAD_BYTES):
        target = landed[run.target][run.target_byte : run.target_byte + run.num_bytes]
        assert (target == -1).all(), "a byte is written twice"
        target[:] = sources[run.source][run.source_byte : run.source_byte + run.num_bytes]
    for block, wanted in zip(landed, expected, strict=True):
        assert np.array_equal(block, wanted)


def test_equal_shards_send_whole_blocks() -> None:
    runs = shard_plan(2, 2, 8, HEAD_BYTES)
    assert [(run.source, run.target, run.num_bytes) for run in runs] == [(0, 0, 12), (1, 1, 12)]


def test_copies_of_a_head_take_turns() -> None:
    assert [run.source for run in shard_plan(4, 4, 2, HEAD_BYTES)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("num_shards", "num_heads"), [(2, 3), (4, 6), (0, 3), (3, 0)])
def test_uneven_shards_are_refused(num_shards: int, num_heads: int) -> None:
    with pytest.raises(ValueError, match="KV heads"):
        shard_plan(num_shards, 1, num_heads, HEAD_BYTES)
