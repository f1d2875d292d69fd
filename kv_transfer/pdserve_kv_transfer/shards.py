"""Which heads of which source shard go to which destination shard, where the two sides cut the KV heads differently.

Pure arithmetic. A shard holds a contiguous range of KV heads; with more shards than heads each head is held by several
shards, which is how tensor parallelism replicates them. A block of a shard has its heads outermost, so that a range of
heads is one run of bytes.
"""

from __future__ import annotations

from typing import NamedTuple


class ShardRun(NamedTuple):
    """Bytes of a block from one shard to another: both offsets are of the shards' own blocks."""

    source: int
    target: int
    source_byte: int
    target_byte: int
    num_bytes: int


def heads_of(shard: int, num_shards: int, num_heads: int) -> range:
    """KV heads of a shard.

    Raises:
        ValueError: the heads cannot be cut, or replicated, evenly.
    """
    if num_shards < 1 or num_heads < 1 or not 0 <= shard < num_shards:
        raise ValueError(f"shard {shard} of {num_shards} with {num_heads} KV heads")
    if num_heads % num_shards == 0:
        share = num_heads // num_shards
        return range(shard * share, (shard + 1) * share)
    if num_shards % num_heads == 0:
        head = shard // (num_shards // num_heads)
        return range(head, head + 1)
    raise ValueError(f"{num_heads} KV heads in {num_shards} shards")


def shard_plan(num_source_shards: int, num_target_shards: int, num_heads: int, head_bytes: int) -> list[ShardRun]:
    """Runs that fill the block of every target shard once, each from the right head.

    Where several source shards hold a head, their copies take turns, so that no shard sends all.

    Args:
        head_bytes: of one KV head in a block.

    Raises:
        ValueError: a side's heads cannot be cut, or replicated, evenly.
    """
    heads_of(0, num_source_shards, num_heads)
    holders: list[list[int]] = [[] for _ in range(num_heads)]
    for source in range(num_source_shards):
        for head in heads_of(source, num_source_shards, num_heads):
            holders[head].append(source)
    runs: list[ShardRun] = []
    for target in range(num_target_shards):
        target_heads = heads_of(target, num_target_shards, num_heads)
        for head in target_heads:
            source = holders[head][target % len(holders[head])]
            first = heads_of(source, num_source_shards, num_heads).start
            run = ShardRun(
                source, target, (head - first) * head_bytes, (head - target_heads.start) * head_bytes, head_bytes
            )
            if runs and _continues(runs[-1], run):
                runs[-1] = runs[-1]._replace(num_bytes=runs[-1].num_bytes + head_bytes)
            else:
                runs.append(run)
    return runs


def _continues(before: ShardRun, run: ShardRun) -> bool:
    same_shards = (before.source, before.target) == (run.source, run.target)
    return same_shards and before.source_byte + before.num_bytes == run.source_byte
