"""The result as a picture: GB/s of each point, one colour for each thing that was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from pdserve_bench.kv.view import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_bench.kv.results import KvResult

# Memory is several times as fast as anything between processes: it would press the rest to the ground.
_NOT_SHOWN = ("memcpy",)


def plot(results: Sequence[KvResult], title: str) -> Figure:
    """A row of bars for each connector."""
    ways = list(dict.fromkeys(result.way for result in results))
    points = list(dict.fromkeys(result.point for result in results))
    whats = [what for what in dict.fromkeys(result.what for result in results) if what not in _NOT_SHOWN]
    figure = Figure(figsize=(11, 3.4 * len(ways)), layout="constrained")
    width = 0.8 / len(whats)
    for row, way in enumerate(ways):
        axes = figure.add_subplot(len(ways), 1, row + 1)
        for index, what in enumerate(whats):
            rates = {result.point: result for result in results if (result.way, result.what) == (way, what)}
            places = [place + (index - (len(whats) - 1) / 2) * width for place, p in enumerate(points) if p in rates]
            heights = [rates[point].bytes_per_s / 1e9 for point in points if point in rates]
            axes.bar(places, heights, width, label=name_of(what), color=f"C{index}")
        axes.set_xticks(range(len(points)), [point.name for point in points], fontsize="small")
        axes.set_ylabel("GB/s")
        axes.set_title(f"{title}: {way}", loc="left")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    return figure
