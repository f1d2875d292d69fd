"""Which of several equal nodes takes the next request. Sees loads, not nodes, sockets or requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_protocol.node import NodeLoad


class Policy(Protocol):
    def choose(self, loads: Sequence[NodeLoad | None]) -> int:
        """Index of the chosen one of ``loads`` (at least one; None where a node has not reported yet)."""
        ...


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, loads: Sequence[NodeLoad | None]) -> int:
        index = self._turn % len(loads)
        self._turn += 1
        return index
