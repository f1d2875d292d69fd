"""When the requests of an open loop are sent, whatever the server does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from random import Random

Process = Literal["poisson", "constant", "gamma"]


def arrival_times(num: int, rate: float, process: Process, burstiness: float, random: Random) -> list[float]:
    """Seconds from the start, in rising order, the first at 0.

    Args:
        rate: requests per second on average.
        process: ``constant``: equal gaps; ``poisson``: independent requests, exponential gaps; ``gamma``: gaps of a
            gamma distribution of this mean.
        burstiness: shape of that gamma distribution: below 1 requests come in bursts, at 1 as in ``poisson``, above
            more evenly.
    """
    mean = 1.0 / rate
    shape = burstiness if process == "gamma" else 1.0
    times = [0.0]
    while len(times) < num:
        gap = mean if process == "constant" else random.gammavariate(shape, mean / shape)
        times.append(times[-1] + gap)
    return times[:num]
