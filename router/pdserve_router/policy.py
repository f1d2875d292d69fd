"""Which of several equal nodes takes a request, and whether a decode node computes a prompt itself. Sees numbers only.

Times are what the tokens that wait at a node take at the rate it says; who has not measured one yet is assumed to have
one. Where nodes are equal they are taken in turn: rates are measured, so waits that differ by little are equal, and
idle nodes are whatever they said, or one slow sample would be the last that a node takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CLEARLY = 0.75
"""A decode node alone must start a stream within this share of what it takes through a prefill node. What it computes
beside its streams makes them slower, and estimates are rough."""

ALIKE = 1.25
"""Waits up to so many times the shortest are equal to it."""

DECODE_SHARE = 0.5
"""Of a prefill node's rate: that of a decode node beside its streams, where one of the two is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a node is.

    Attributes:
        attempts: of this router that are open there.
        pending_tokens: prompt tokens that this router has sent there, of attempts that have no token yet.
        tokens_per_s: at which it computes prompts; 0 before it has measured that.
        computed_share: of the tokens of prompts, those that it computes and has not cached.
        free_tokens: for which it has room in its KV cache, as it said last.
        requests: that run or wait there, of all routers.
        max_num_seqs: of which run at the same time at most; 0 where that is not known.
    """

    attempts: int = 0
    pending_tokens: int = 0
    tokens_per_s: float = 0.0
    computed_share: float = 1.0
    free_tokens: int = 0
    requests: int = 0
    max_num_seqs: int = 0

    @property
    def is_full(self) -> bool:
        """A request that comes now waits for the end of another one, however much room there is."""
        return 0 < self.max_num_seqs <= self.requests

    def wait_s(self, num_tokens: int, tokens_per_s: float) -> float:
        """Until it has computed a prompt of so many tokens as well."""
        return (self.pending_tokens + num_tokens) * self.computed_share / tokens_per_s


class InTurn:
    """Of the nodes with the lowest cost, each in turn. ``alike``: up to so many times the lowest is the lowest too."""

    def __init__(self, alike: float = 1.0) -> None:
        self._alike = alike
        self._next = 0

    def choose(self, costs: Sequence[float]) -> int:
        """Index of the chosen one of at least one."""
        most = min(costs) * self._alike
        best = [index for index, cost in enumerate(costs) if cost <= most]
        index = next((index for index in best if index >= self._next % len(costs)), best[0])
        self._next = index + 1
        return index


def prefill_costs(loads: Sequence[Load], num_tokens: int) -> list[float]:
    """Of prefill nodes, for a prompt of so many tokens: the expected wait; that of the quickest for all idle ones."""
    known = [load.tokens_per_s for load in loads if load.tokens_per_s > 0]
    assumed = sum(known) / len(known) if known else 1.0
    waits = [load.wait_s(num_tokens, load.tokens_per_s or assumed) for load in loads]
    idle = [wait for load, wait in zip(loads, waits, strict=True) if load.pending_tokens <= 0]
    return [wait if load.pending_tokens > 0 else min(idle) for load, wait in zip(loads, waits, strict=True)]


def decode_costs(loads: Sequence[Load]) -> list[float]:
    """Of decode nodes: the streams that they already have."""
    return [load.attempts for load in loads]


def is_quicker_alone(prefill: Load, decode: Load, num_tokens: int) -> bool:
    """Whether the decode node should compute a prompt of so many tokens itself. An idle prefill node always gets it."""
    has_room = decode.free_tokens >= decode.pending_tokens + num_tokens and not decode.is_full
    if prefill.pending_tokens <= 0 or not has_room:
        return False
    prefill_rate = prefill.tokens_per_s or decode.tokens_per_s / DECODE_SHARE or 1.0
    decode_rate = decode.tokens_per_s or prefill_rate * DECODE_SHARE
    return decode.wait_s(num_tokens, decode_rate) < CLEARLY * prefill.wait_s(num_tokens, prefill_rate)
