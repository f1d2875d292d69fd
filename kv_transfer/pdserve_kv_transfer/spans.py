"""Which tokens of which blocks: the sender's blocks against the receiver's, whose sizes may differ.

Pure arithmetic over token positions. What travels is always a whole block of the sender.
"""

from __future__ import annotations

from typing import NamedTuple


class CopyRun(NamedTuple):
    """``num_tokens`` tokens, from ``source_token`` of a sent block on, go to ``target_token`` on of a receiver's block.

    ``target`` is that block: its index in the sequence, or, once it is known, its number in the cache.
    """

    target: int
    source_token: int
    target_token: int
    num_tokens: int


def positions_to_send(num_tokens: int, first_needed: int, source_size: int) -> list[int]:
    """Positions of the sender's blocks, ``source_size`` tokens each, that have any of [first_needed, num_tokens)."""
    if first_needed >= num_tokens:
        return []
    return list(range(first_needed // source_size * source_size, num_tokens, source_size))


def copy_runs(position: int, source_size: int, target_size: int, first_needed: int, num_tokens: int) -> list[CopyRun]:
    """Where the tokens of the sender's block at ``position`` go, those before ``first_needed`` left out.

    What lies before is in blocks that the receiver shares with others and must not touch.
    """
    runs = []
    token, end = max(position, first_needed), min(position + source_size, num_tokens)
    while token < end:
        target, target_token = divmod(token, target_size)
        count = min(end - token, target_size - target_token)
        runs.append(CopyRun(target, token - position, target_token, count))
        token += count
    return runs
