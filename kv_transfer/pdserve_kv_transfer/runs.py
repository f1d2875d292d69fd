"""Coalescing: neighbours that travel together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def runs(pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(block, slot, length) of maximal runs in which block and slot both rise by one."""
    first_block = first_slot = length = 0
    for block, slot in sorted(pieces):
        if length and block == first_block + length and slot == first_slot + length:
            length += 1
            continue
        if length:
            yield first_block, first_slot, length
        first_block, first_slot, length = block, slot, 1
    if length:
        yield first_block, first_slot, length
