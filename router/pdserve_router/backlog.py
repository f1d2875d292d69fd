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

_KEPT = 0.9
"""Of what is known of a node's prompts, at each further one."""

LEAST_SHARE = 0.1
"""Of a prompt: what it takes to serve one that is cached."""


@dataclass(slots=True)
class _Open:
    nodes: Sequence[str]
    prefiller: str
    num_tokens: int
    has_started: bool = False


class Backlog:
    """Every attempt that is ``opened`` must be ``closed``; then nothing is left of it."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._attempts: Counter[str] = Counter()
        self._pending: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        # By node: tokens computed, and of prompts, the more recent the more they count.
        self._computed: dict[str, tuple[float, float]] = {}

    def opened(self, attempt_id: str, nodes: Sequence[str], *, prefiller: str, num_tokens: int) -> None:
        """An attempt goes to ``nodes``, of which one computes ``num_tokens`` of it, then its first token."""
        self._open[attempt_id] = _Open(nodes, prefiller, num_tokens)
        self._attempts.update(nodes)
        self._pending[prefiller] += 1
        self._tokens[prefiller] += num_tokens

    def started(self, attempt_id: str, computed_tokens: int | None = None) -> None:
        """Its first token is here, or its end. Idempotent. ``computed_tokens``: of its prompt, if its node has said."""
        open = self._open.get(attempt_id)
        if open is None or open.has_started:
            return
        open.has_started = True
        self._pending[open.prefiller] -= 1
        self._tokens[open.prefiller] -= open.num_tokens
        if computed_tokens is not None and open.num_tokens > 0:
            computed, total = self._computed.get(open.prefiller, (0.0, 0.0))
            # A node's numbers are foreign.
            computed = _KEPT * computed + min(max(computed_tokens, 0), open.num_tokens)
            self._computed[open.prefiller] = computed, _KEPT * total + open.num_tokens

    def closed(self, attempt_id: str) -> None:
        """Whatever has become of it. Idempotent."""
        self.started(attempt_id)
        open = self._open.pop(attempt_id, None)
        if open is not None:
            self._attempts.subtract(open.nodes)

    def attempts(self, node: str) -> int:
        """Open attempts with a half on the node."""
        return self._attempts[node]

    def pending_attempts(self, node: str) -> int:
        """Attempts whose prompt the node computes and that have no token yet."""
        return self._pending[node]

    def pending_tokens(self, node: str) -> int:
        """Prompt tokens of these, cached ones too."""
        return self._tokens[node]

    def computed_share(self, node: str) -> float:
        """Of the tokens of the prompts that it had lately, those that it computed and had not cached."""
        computed, total = self._computed.get(node, (1.0, 1.0))
        return max(computed / total, LEAST_SHARE)
