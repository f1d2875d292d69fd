"""The result as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_bench.tables import Table, number

if TYPE_CHECKING:
    from pdserve_bench.kernels.config import KernelsBench
    from pdserve_bench.kernels.results import Result, StepResult

# Operations that take less of a step are not shown; the JSON has them all.
_SMALLEST_SHARE = 0.002


def describe_threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def tables(bench: KernelsBench, result: Result, backend: str) -> list[Table]:
    """Floors and whole steps of all backends, operations of ``backend``."""
    return [_floors(bench, result), _steps(bench, result), *(_operations(step) for step in result.of(backend))]


def _floors(bench: KernelsBench, result: Result) -> Table:
    bandwidth, peak = result.bandwidth, result.peak
    return Table(
        title=f"{bench.label or bench.model}: floors, {describe_threads(bench.threads)}",
        columns=["", "median", "lowest", "highest"],
        rows=[
            ["read bandwidth, GB/s", *(number(x / 1e9) for x in (bandwidth.p50, bandwidth.min, bandwidth.max))],
            [f"matrix peak, {bench.dtype}, GFLOP/s", *(number(x / 1e9) for x in (peak.p50, peak.min, peak.max))],
        ],
    )


def _steps(bench: KernelsBench, result: Result) -> Table:
    rows = [
        [
            step.scenario.name,
            step.backend,
            number(step.seconds.p50 * 1e3),
            number(step.memory_s * 1e3),
            number(step.matrix_s * 1e3),
            f"{step.memory_ratio:.2f}" if step.scenario.kind == "decode" else "-",
            f"{step.ratio:.2f}",
            f"{step.best_ratio:.2f}",
            f"{step.peak_share:.0%}",
            number(step.outside_s * 1e3),
            f"{step.speedup:.2f}x" if step.speedup is not None else "-",
        ]
        for step in result.steps
    ]
    columns = ["step", "backend", "ms", "memory", "matrix", "/ memory", "/ floor", "at best", "of peak", "outside"]
    columns.append("speed-up")
    note = (
        "memory: weights and KV over read bandwidth; matrix: FLOPs over matrix peak; medians, ms. floor: the "
        "higher of the two. The ratios are medians of each step over its own floor, with the bandwidth measured right "
        "before it; at best: fastest step over the floor at the highest bandwidth and peak. outside: ms not in the "
        "backend (inputs, sampling, Python)"
    )
    if bench.baseline is not None:
        note += f". speed-up: over {bench.baseline}"
    return Table(title=f"whole steps, decode at context {bench.context}", columns=columns, rows=rows, note=note)


def _operations(step: StepResult) -> Table:
    total_s = step.outside_s + sum(operation.seconds for operation in step.operations)
    rows = [
        [
            operation.name,
            str(operation.calls),
            number(operation.seconds * 1e3),
            f"{operation.seconds / total_s:.1%}",
            number(operation.floor_s * 1e3) if operation.floor_s is not None else "-",
            f"{operation.ratio:.2f}" if operation.ratio is not None else "-",
        ]
        for operation in step.operations
        if operation.seconds >= _SMALLEST_SHARE * total_s
    ]
    rows.append(["outside", "", number(step.outside_s * 1e3), f"{step.outside_s / total_s:.1%}", "-", "-"])
    columns = ["operation", "calls", "ms", "share", "floor", "ms / floor"]
    title = f"{step.scenario.name}, {step.backend}: operations one by one"
    return Table(title=title, columns=columns, rows=rows)
