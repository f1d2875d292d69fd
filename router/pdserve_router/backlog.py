"""Backlog: what this router has sent to its nodes and is not done with.

Nodes report their load once a second; this is exact and says at once what the last request added. Knows attempts by id
and nodes by name, and nothing else of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class _Open:
    nodes: Sequence[str]
    prefiller: str
    num_tokens: int


class Backlog:
    """Every attempt that is ``opened`` must be ``closed``; then nothing is left of it."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._attempts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def opened(self, attempt_id: str, nodes: Sequence[str], *, prefiller: str, num_tokens: int) -> None:
        """An attempt goes to ``nodes``, of which one computes ``num_tokens`` of it, then its first token."""
        self._open[attempt_id] = _Open(nodes, prefiller, num_tokens)
        self._attempts.update(nodes)
        self._tokens[prefiller] += num_tokens

    def started(self, attempt_id: str) -> None:
        """Its first token is here, or its end. Idempotent."""
        open = self._open.get(attempt_id)
        if open is not None:
            self._tokens[open.prefiller] -= open.num_tokens
            open.num_tokens = 0

    def closed(self, attempt_id: str) -> None:
        """Whatever has become of it. Idempotent."""
        self.started(attempt_id)
        open = self._open.pop(attempt_id, None)
        if open is not None:
            self._attempts.subtract(open.nodes)

    def attempts(self, node: str) -> int:
        """Open attempts with a half on the node."""
        return self._attempts[node]

    def pending_tokens(self, node: str) -> int:
        """Prompt tokens that the node computes before the attempts that wait there have their first token."""
        return self._tokens[node]
