"""Samples -> times, GB/s and ratios. Baselines are of the same process and the same repetitions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from pdserve_bench.stats import Distribution, distribution

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve_bench.kv.config import Point, Way
    from pdserve_bench.kv.messages import Sample

BASELINES = ("memcpy", "socket", "nixl")


@dataclass(frozen=True, kw_only=True)
class KvResult:
    """One thing that was measured at one point.

    Attributes:
        bytes_per_s: the point's bytes over the median.
        over: this one's bytes per second over those of each baseline: median of the ratios within each repetition.
    """

    way: str
    what: str
    point: Point
    seconds: Distribution
    bytes_per_s: float
    over: Mapping[str, float]


def _rank(what: str) -> int:
    order = [*BASELINES, "mooncake", "connector"]
    return order.index(what) if what in order else len(order)


def results_of(way: Way, samples: Iterable[Sample], mooncake: Mapping[Point, list[float]]) -> list[KvResult]:
    """Points in their order, and for each of them baselines first."""
    seconds: defaultdict[tuple[Point, str], list[float]] = defaultdict(list)
    for sample in samples:
        seconds[sample.point, sample.what].append(sample.seconds)
    for point, peer in mooncake.items():
        seconds[point, "mooncake"] = peer
    found = []
    for (point, what), times in sorted(seconds.items(), key=lambda item: (item[0][0], _rank(item[0][1]), item[0][1])):
        spread = distribution(times)
        assert spread is not None, "a run has at least one repetition"
        over = {
            baseline: median(base / mine for base, mine in zip(seconds[point, baseline], times, strict=False))
            for baseline in (*BASELINES, "mooncake")
            if baseline != what and (point, baseline) in seconds
        }
        rate = point.num_bytes / spread.p50
        found.append(KvResult(way=way.name, what=what, point=point, seconds=spread, bytes_per_s=rate, over=over))
    return found
