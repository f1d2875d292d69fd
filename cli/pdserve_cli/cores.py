"""Which cores each node computes on. Knows nothing of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def split_cores(cores: Sequence[int], num_nodes: int) -> list[tuple[int, ...]]:
    """Cores for each of ``num_nodes`` nodes: neighbours together, as even as it goes, at least one each.

    No core is given to two nodes unless there are fewer cores than nodes; then they take turns.

    Raises:
        ValueError: there is no core or no node.
    """
    if not cores or num_nodes < 1:
        raise ValueError(f"cannot split {len(cores)} cores between {num_nodes} nodes")
    ordered = sorted(cores)
    if len(ordered) < num_nodes:
        return [(ordered[node % len(ordered)],) for node in range(num_nodes)]
    share, rest = divmod(len(ordered), num_nodes)
    split: list[tuple[int, ...]] = []
    start = 0
    for node in range(num_nodes):
        end = start + share + (node < rest)
        split.append(tuple(ordered[start:end]))
        start = end
    return split
