"""What hand-offs have cost: counters by peer, times as histograms, and blocks whose requests do not decode yet."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from pdserve_protocol.node import Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.035, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
MAX_PEERS = 256
"""Peers beyond these, in the order of their coming, are counted together."""

OTHERS = "others"


class HandoffStats:
    """Counts since the start. ``count`` names are those that operators see."""

    def __init__(self) -> None:
        self._by_peer: dict[str, Counter[str]] = {}
        self._times: dict[str, SecondsHistogram] = {}

    def count(self, peer: str, **amounts: float) -> None:
        """Adds to the counters of a peer."""
        if peer not in self._by_peer and len(self._by_peer) >= MAX_PEERS:
            peer = OTHERS
        counters = self._by_peer.setdefault(peer, Counter())
        for name, amount in amounts.items():
            counters[name] += amount  # type: ignore[assignment]

    def observe(self, **seconds: float) -> None:
        """One more hand-off took so long in each of its parts."""
        for name, value in seconds.items():
            self._times.setdefault(name, SecondsHistogram()).observe(value)

    def total(self, name: str) -> float:
        """Of all peers."""
        return sum(counters[name] for counters in self._by_peer.values())

    def by_peer(self) -> Mapping[str, Counter[str]]:
        return self._by_peer

    def histograms(self) -> dict[str, Histogram]:
        return {name: times.histogram() for name, times in self._times.items()}


def merged(*stats: HandoffStats) -> dict[str, dict[str, float]]:
    """The counters of each peer, in both directions."""
    peers: dict[str, Counter[str]] = {}
    for one in stats:
        for peer, counters in one.by_peer().items():
            peers.setdefault(peer, Counter()).update(counters)
    return {peer: dict(counters) for peer, counters in peers.items()}


class SecondsHistogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum += seconds

    def histogram(self) -> Histogram:
        return Histogram(bounds=list(BOUNDS_S), counts=list(self._counts), sum=self._sum)


class ReservedBlocks:
    """Blocks that were reserved for requests which are not decoding yet: memory that does nothing.

    Attributes:
        now: so many at the moment.
        most: so many at the worst moment.
    """

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self._by_request: dict[str, int] = {}
        self._block_seconds = 0.0
        self._changed_at = 0.0

    def reserve(self, request_id: str, num_blocks: int, now: float) -> None:
        self._pass_time(now)
        self._by_request[request_id] = num_blocks
        self.now += num_blocks
        self.most = max(self.most, self.now)

    def release(self, request_id: str, now: float) -> None:
        """It decodes, or is over. Harmless where nothing is reserved."""
        self._pass_time(now)
        self.now -= self._by_request.pop(request_id, 0)

    def block_seconds(self, now: float) -> float:
        """Reserved blocks times how long they were."""
        self._pass_time(now)
        return self._block_seconds

    def _pass_time(self, now: float) -> None:
        self._block_seconds += self.now * (now - self._changed_at)
        self._changed_at = now
