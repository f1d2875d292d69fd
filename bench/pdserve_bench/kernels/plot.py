"""The result as a picture: each step in units of its floor, by operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pdserve_bench.kernels.results import Result, StepResult

_COLOURS = (
    "#2b6cb0",
    "#4299e1",
    "#90cdf4",
    "#285e61",
    "#38b2ac",
    "#9ae6b4",
    "#975a16",
    "#ecc94b",
    "#b794f4",
    "#ed64a6",
)
_OTHER, _OUTSIDE, _BASELINE = "#a0aec0", "#dd6b20", "#1a202c"


def plot(result: Result, backend: str, baseline: str | None, title: str) -> Figure:
    """Stacked bars of ``backend``'s operations one by one; marks for its whole steps and for those of ``baseline``."""
    steps = result.of(backend)
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots()
    bottoms = [0.0] * len(steps)
    places = list(range(len(steps)))

    def stack(label: str, seconds: list[float], colour: str) -> None:
        heights = [value / step.floor_s for value, step in zip(seconds, steps, strict=True)]
        axes.bar(places, heights, bottom=bottoms, label=label, color=colour, width=0.6)
        for index, height in enumerate(heights):
            bottoms[index] += height

    names = _largest(steps)
    for name, colour in zip(names, _COLOURS, strict=False):
        stack(name, [_seconds(step, {name}) for step in steps], colour)
    stack("other operations", [_seconds(step, None, set(names)) for step in steps], _OTHER)
    stack("outside the backend", [step.outside_s for step in steps], _OUTSIDE)
    axes.plot(places, [step.ratio for step in steps], "D", color=_BASELINE, markersize=7, label="whole step")
    if baseline is not None and baseline != backend:
        ratios = [step.ratio for step in result.of(baseline)]
        starts, ends = [place - 0.3 for place in places], [place + 0.3 for place in places]
        axes.hlines(ratios, starts, ends, color=_BASELINE, linewidth=2, label=baseline)
    for place, step in zip(places, steps, strict=True):
        text = f"{step.seconds.p50 * 1e3:.1f} ms\n{step.ratio:.2f}x"
        axes.annotate(
            text,
            (place, max(bottoms[place], step.ratio)),
            (0, 8),
            textcoords="offset points",
            ha="center",
            fontsize="small",
        )
    axes.axhline(1.0, color=_BASELINE, linestyle="--", linewidth=1)
    axes.set_xticks(places, [step.scenario.name for step in steps])
    axes.set_ylabel("time of a step / its floor")
    axes.set_ylim(0, 1.15 * max([*bottoms, *(step.ratio for step in result.steps)], default=1.0))
    axes.set_title(title, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _largest(steps: list[StepResult]) -> list[str]:
    """Operations with the largest shares of any step, as many as there are colours."""
    shares: dict[str, float] = {}
    for step in steps:
        for operation in step.operations:
            share = operation.seconds / step.seconds.p50
            shares[operation.name] = max(shares.get(operation.name, 0.0), share)
    return sorted(shares, key=lambda name: -shares[name])[: len(_COLOURS)]


def _seconds(step: StepResult, names: set[str] | None, but: set[str] = frozenset()) -> float:  # type: ignore[assignment]
    """In these operations; with None in all but ``but``."""
    return sum(
        operation.seconds
        for operation in step.operations
        if (operation.name in names if names is not None else operation.name not in but)
    )
