"""A run as a picture: how latencies are distributed, and how the run went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pdserve_bench.serve.view import LATENCY_NAMES
from pdserve_bench.stats import moving_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from pdserve_bench.serve.records import Latency, RequestRecord
    from pdserve_bench.serve.slo import Objective
    from pdserve_bench.serve.summary import Summary

_NUM_WINDOWS = 60
_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd6b20", "#718096"


def plot(records: Sequence[RequestRecord], summary: Summary, objectives: tuple[Objective, ...], title: str) -> Figure:
    """Distributions of TTFT and of the gaps between tokens; tokens per second and requests under way over time."""
    answered = [record for record in records if record.error is None]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title)
    ((ttft, gaps), (rate, running)) = figure.subplots(2, 2)
    first = [value for record in answered if (value := record.latency("ttft")) is not None]
    second = [value for record in answered if (value := record.latency("second")) is not None]
    _cumulative(ttft, first, "first token", _BLUE)
    _cumulative(ttft, second, "second token", _ORANGE)
    _finish_cumulative(ttft, "seconds since the request", "ttft", objectives)
    between = [gap * 1e3 for record in answered for gap in record.gaps]
    _cumulative(gaps, between, "gap", _BLUE)
    if any(gap > 0 for gap in between):
        gaps.set_xscale("log")
    gaps.xaxis.set_major_formatter(FuncFormatter(_log_label))
    gaps.xaxis.set_minor_formatter(FuncFormatter(_log_label))
    _finish_cumulative(gaps, "milliseconds between tokens", "itl", objectives, scale=1e3)
    start = min(record.due for record in records)
    width = max(summary.duration_s / _NUM_WINDOWS, 0.05)
    middles, rates = moving_rate([t - start for record in answered for t in record.token_times], width)
    rate.plot(middles, rates, color=_BLUE)
    rate.axhline(summary.output_tokens_per_s, color=_GREY, linestyle="--", linewidth=1, label="mean")
    _finish_timeline(rate, "chunks of output per second")
    rate.legend(frameon=False)
    times, counts = _under_way([(record.due - start, record.ended - start) for record in records])
    running.step(times, counts, where="post", color=_BLUE)
    _finish_timeline(running, "requests under way")
    running.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _cumulative(axes: Axes, values: list[float], label: str, colour: str) -> None:
    values = sorted(values)
    shares = [(index + 1) / len(values) for index in range(len(values))]
    axes.step(values, shares, where="post", label=label, color=colour)


def _finish_cumulative(
    axes: Axes, label: str, what: Latency, objectives: tuple[Objective, ...], scale: float = 1.0
) -> None:
    for objective in objectives:
        if objective.what == what:
            axes.axvline(objective.limit_s * scale, color=_GREY, linestyle="--", linewidth=1, label="objective")
    axes.set_xlabel(label)
    axes.set_ylabel("share")
    axes.set_ylim(0, 1.02)
    axes.set_title(f"{LATENCY_NAMES[what]}, cumulative", fontsize="medium", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")


def _finish_timeline(axes: Axes, label: str) -> None:
    axes.set_xlabel("seconds")
    axes.set_ylim(bottom=0)
    axes.set_title(label, fontsize="medium", loc="left")
    axes.grid(alpha=0.3)


def _log_label(value: float, _position: int | None) -> str:
    """1, 2, 5, 10, ...; others would run into each other."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""


def _under_way(spans: list[tuple[float, float]]) -> tuple[list[float], list[int]]:
    """Times at which the number of open spans changes, and the number from then on."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    times, counts, count = [0.0], [0], 0
    for time, change in changes:
        count += change
        times.append(time)
        counts.append(count)
    return times, counts
