"""What each phase cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve_bench.router.config import Phase


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where things stood: seconds of the monotonic clock, the router's processor time, what was counted."""

    at: float
    router_cpu_s: float
    requests: int
    chunks: int


@dataclass(frozen=True, kw_only=True)
class PhaseCost:
    """One phase between two moments.

    Attributes:
        chunks_per_s: events of streams with a token.
        cpu_ms_per_1000_chunks: None where nothing is streamed.
        router_busy: processor time over time; 1 is a whole core.
    """

    phase: Phase
    requests_per_s: float
    chunks_per_s: float
    cpu_ms_per_request: float
    cpu_ms_per_1000_chunks: float | None
    router_busy: float


def cost(phase: Phase, before: Moment, after: Moment) -> PhaseCost:
    """Of what lies between."""
    seconds, cpu_s = after.at - before.at, after.router_cpu_s - before.router_cpu_s
    requests = max(after.requests - before.requests, 1)
    # The last chunk of a stream and [DONE] hold no token.
    chunks = after.chunks - before.chunks - 2 * requests if phase.stream else 0
    return PhaseCost(
        phase=phase,
        requests_per_s=requests / seconds,
        chunks_per_s=chunks / seconds,
        cpu_ms_per_request=cpu_s * 1e3 / requests,
        cpu_ms_per_1000_chunks=cpu_s * 1e6 / chunks if chunks > 0 else None,
        router_busy=cpu_s / seconds,
    )
