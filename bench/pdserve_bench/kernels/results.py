"""Samples -> times, ratios to the floor, and the time between operations."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from pdserve_bench.stats import Distribution, distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_bench.kernels.config import Scenario
    from pdserve_bench.kernels.costs import Cost
    from pdserve_bench.kernels.measure import Samples, StepSamples


@dataclass(frozen=True, kw_only=True)
class OperationResult:
    """All calls of an operation in a step; medians over the repetitions. None where its cost is not known."""

    name: str
    calls: int
    seconds: float
    floor_s: float | None

    @property
    def ratio(self) -> float | None:
        return self.seconds / self.floor_s if self.floor_s else None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A kind of step on one backend.

    Attributes:
        seconds: of whole steps.
        num_bytes, flops: what a step costs at least, mean over the repetitions.
        memory_s, matrix_s: the two floors, at the run's median bandwidth and peak.
        ratio: of a step to the higher floor at the bandwidth measured right before it; median.
        memory_ratio: the same to its bytes over that bandwidth.
        best_ratio: fastest step over the floor at the highest bandwidth and peak that were seen.
        peak_share: FLOPs per second over the peak, medians.
        outside_s: not in the backend: inputs, sampling, and Python; also what lies between operations, where the
            backend does not fuse them.
        speedup: median of the baseline over this one's; None for the baseline.
    """

    scenario: Scenario
    backend: str
    seconds: Distribution
    num_bytes: float
    flops: float
    memory_s: float
    matrix_s: float
    ratio: float
    memory_ratio: float
    best_ratio: float
    peak_share: float
    outside_s: float
    speedup: float | None
    operations: list[OperationResult]

    @property
    def floor_s(self) -> float:
        return max(self.memory_s, self.matrix_s)


@dataclass(frozen=True, kw_only=True)
class Result:
    """``bandwidth``: bytes per second; ``peak``: FLOPs per second, of the model's dtype."""

    bandwidth: Distribution
    peak: Distribution
    steps: list[StepResult]

    def of(self, backend: str) -> list[StepResult]:
        return [step for step in self.steps if step.backend == backend]


def result_of(samples: Samples, baseline: str | None) -> Result:
    """Of at least one repetition."""
    bandwidth, peak = _distribution(samples.bandwidths), _distribution(samples.peaks)
    baselines = {steps.scenario: median(steps.seconds) for steps in samples.steps if steps.backend == baseline}
    return Result(
        bandwidth=bandwidth,
        peak=peak,
        steps=[
            _step(steps, bandwidth, peak, None if steps.backend == baseline else baselines.get(steps.scenario))
            for steps in samples.steps
        ],
    )


def _step(steps: StepSamples, bandwidth: Distribution, peak: Distribution, baseline_s: float | None) -> StepResult:
    seconds = _distribution(steps.seconds)
    memory_s = _mean([cost.num_bytes for cost in steps.costs]) / bandwidth.p50
    lowest_floors = [cost.floor_s(bandwidth.max, peak.max) for cost in steps.costs]
    flops = _mean([cost.flops for cost in steps.costs])
    matrix_s = flops / peak.p50
    return StepResult(
        scenario=steps.scenario,
        backend=steps.backend,
        seconds=seconds,
        num_bytes=_mean([cost.num_bytes for cost in steps.costs]),
        flops=flops,
        memory_s=memory_s,
        matrix_s=matrix_s,
        ratio=_median_ratio(steps.seconds, steps.floors_s),
        memory_ratio=_median_ratio(steps.seconds, steps.memory_s),
        best_ratio=min(step / floor for step, floor in zip(steps.seconds, lowest_floors, strict=True)),
        peak_share=flops / seconds.p50 / peak.p50,
        outside_s=median(steps.outside_s),
        speedup=baseline_s / seconds.p50 if baseline_s is not None else None,
        operations=_operations(steps, bandwidth, peak),
    )


def _operations(steps: StepSamples, bandwidth: Distribution, peak: Distribution) -> list[OperationResult]:
    """The slowest first."""
    found = []
    for name, last in steps.operations[-1].items():
        all_times = [times[name] for times in steps.operations if name in times]
        found.append(
            OperationResult(
                name=name,
                calls=last.calls,
                seconds=median(operation.seconds for operation in all_times),
                floor_s=_floor([operation.cost for operation in all_times], bandwidth, peak),
            )
        )
    return sorted(found, key=lambda operation: -operation.seconds)


def _floor(costs: Sequence[Cost | None], bandwidth: Distribution, peak: Distribution) -> float | None:
    floors = [cost.floor_s(bandwidth.p50, peak.p50) for cost in costs if cost is not None]
    return median(floors) if floors else None


def _distribution(values: Sequence[float]) -> Distribution:
    found = distribution(values)
    assert found is not None, "a run has at least one repetition"
    return found


def _median_ratio(values: Sequence[float], floors: Sequence[float]) -> float:
    return median(value / floor for value, floor in zip(values, floors, strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
