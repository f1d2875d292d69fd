"""Prometheus metrics of a router, in a registry of their own. Derived from the requests' traces and proofs."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve_router.proof import Proof

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
_ITL_SECONDS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_SPLIT = {
    "queue": "Arrival at the node to first scheduled",
    "prefill": "First scheduled to first token",
    "grant": "Offer received to grant sent",
    "transfer": "Grant sent to the last word about written blocks",
    "landing": "Digest and copy of landed blocks after that",
    "admission": "Landed to first scheduled on the decode node",
}


class TokenHistogram(Collector):
    """A histogram that is observed for every token: without the library's locks, since one thread does it all."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """``count`` times the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class RouterMetrics:
    """All metrics, by what they measure. Names begin with ``pdserve_router_``."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.ttft = self._seconds("time_to_first_token", "Arrival of a request to its first token")
        self.itl = TokenHistogram(
            "pdserve_router_inter_token_latency_seconds", "Time between two tokens of a request", _ITL_SECONDS
        )
        self._registry.register(self.itl)
        self.e2e = self._seconds("request", "Arrival of a request to its end")
        self._split = {name: self._seconds(name, text) for name, text in _SPLIT.items()}
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens, each once on each side that took part, by where their KV came from",
            "side",
            "source",
        )
        self.generated_tokens = self._counter("generated_tokens", "Output tokens")
        self.requests = self._counter("requests", "Requests by how they ended", "endpoint", "end", "status")
        self.bytes_moved = self._counter("kv_bytes_moved", "Bytes of KV moved between nodes")
        self.blocks_moved = self._counter("kv_blocks_moved", "Blocks of KV moved between nodes")
        self.fallbacks = self._counter(
            "fallbacks", "Requests that a decode node did whole although prefill nodes are configured, by why", "reason"
        )
        self.retries = self._counter(
            "retries",
            "Attempts in the place of one that failed, on other nodes or on fewer, by why it failed",
            "reason",
        )
        self.inexact = self._counter("inexact_requests", "Requests over nodes with unlike numerics")
        self.running = Gauge("pdserve_router_requests_running", "Requests being served", registry=self._registry)
        self._nodes_up = Gauge("pdserve_router_nodes_up", "Nodes alive", ["role"], registry=self._registry)

    def register(self, collector: Collector) -> None:
        """``collector`` is asked at each scrape."""
        self._registry.register(collector)

    def watch_nodes(self, role: str, count: Callable[[], int]) -> None:
        """``count`` is asked for the number of live nodes at each scrape."""
        self._nodes_up.labels(role).set_function(count)

    def observe_proof(self, proof: Proof, num_prompt_tokens: int) -> None:
        """Count what one request's nodes did."""
        for name, histogram in self._split.items():
            milliseconds = getattr(proof.time, f"{name}_ms")
            if milliseconds is not None:
                histogram.observe(milliseconds / 1000)
        first_side = "decode" if proof.mode in ("aggregated", "forked") else "prefill"
        cached = getattr(proof.cached_tokens, first_side)
        if cached is not None:
            source = "recomputed" if proof.mode == "forked" else "computed"
            self._count_prompt(first_side, **{"cached": cached, source: num_prompt_tokens - cached})
        if proof.transport is not None:
            cached, recomputed = proof.cached_tokens.decode or 0, proof.tokens_recomputed
            transferred = num_prompt_tokens - cached - recomputed
            self._count_prompt("decode", cached=cached, recomputed=recomputed, transferred=transferred)
        self.bytes_moved.inc(max(proof.bytes_moved, 0))
        self.blocks_moved.inc(max(proof.blocks_moved, 0))
        if not proof.exact:
            self.inexact.inc()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _count_prompt(self, side: str, **sources: int) -> None:
        for source, count in sources.items():
            # A node's numbers are foreign: nonsense among them must not fail the request.
            self.prompt_tokens.labels(side, source).inc(max(count, 0))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pdserve_router_{name}", text, registry=self._registry, buckets=buckets)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(f"{name}_seconds", text, _SECONDS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdserve_router_{name}", text, labels, registry=self._registry)
