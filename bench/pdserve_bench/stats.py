"""Distributions of measured values. Knows nothing of what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Mean and percentiles, in the unit of the values. Between two values a percentile is interpolated linearly."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """What describes ``values``; None where there are none."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    p0, p50, p90, p99, p100 = (float(value) for value in np.percentile(array, [0, 50, 90, 99, 100]))
    # The sum of equal values can be a rounding off their number times one of them.
    mean = min(max(float(array.mean()), p0), p100)
    return Distribution(count=len(array), mean=mean, min=p0, p50=p50, p90=p90, p99=p99, max=p100)


def moving_rate(times: Sequence[float], width: float) -> tuple[list[float], list[float]]:
    """Events per second in windows of ``width`` seconds that cover ``times`` from 0 on: middles and rates."""
    if not times:
        return [], []
    num_windows = int(max(times) // width) + 1
    counts, edges = np.histogram(times, bins=num_windows, range=(0.0, num_windows * width))
    return [float(edge) + width / 2 for edge in edges[:-1]], [float(count) / width for count in counts]
