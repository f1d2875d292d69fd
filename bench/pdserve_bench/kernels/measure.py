"""Repetitions of steps, turn by turn: floors, scenarios and backends alternate, so that what else the machine does
meets them all alike. Memory changes its pace within a second where others use it too: each step has a bandwidth of its
own, measured before it. Between the two is a step that is not counted, since a server's steps follow each other: the
first after a third of a second of something else is slower by a twentieth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_bench.kernels.costs import step_cost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve_bench.kernels.config import Scenario
    from pdserve_bench.kernels.costs import Cost
    from pdserve_bench.kernels.driver import Driver
    from pdserve_bench.kernels.floors import MatrixPeak, ReadBandwidth
    from pdserve_bench.kernels.timed import OperationTime

WARMUP_STEPS = 1


@dataclass(slots=True, kw_only=True)
class StepSamples:
    """Of one scenario on one backend; the lists have an item per repetition.

    Attributes:
        seconds, costs: of steps as the backend computes them.
        floors_s, memory_s: what the machine would have needed then, for all of a step and for its bytes alone.
        operations: of steps that are computed operation by operation, by name.
        outside_s: what of a step was neither in the backend's own decoder, where it has one, nor in an operation.
    """

    scenario: Scenario
    backend: str
    seconds: list[float] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    floors_s: list[float] = field(default_factory=list)
    memory_s: list[float] = field(default_factory=list)
    operations: list[dict[str, OperationTime]] = field(default_factory=list)
    outside_s: list[float] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Samples:
    """``bandwidths``: bytes per second, one per step; ``peaks``: FLOPs per second, one per repetition."""

    bandwidths: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    steps: list[StepSamples] = field(default_factory=list)


def steps_of_a_scenario(repetitions: int) -> int:
    return WARMUP_STEPS + 3 * repetitions


def measure(
    drivers: Mapping[str, Driver],
    scenarios: Sequence[Scenario],
    repetitions: int,
    bandwidth: ReadBandwidth,
    peak: MatrixPeak,
    on_step: Callable[[str], None],
) -> Samples:
    """Runs everything ``repetitions`` times.

    Args:
        drivers: by the name of their backend.
        on_step: called before each step with what it is.
    """
    samples = Samples()
    runs = [
        (StepSamples(scenario=scenario, backend=name), driver)
        for scenario in scenarios
        for name, driver in drivers.items()
    ]
    samples.steps = [steps for steps, _ in runs]
    for steps, driver in runs:
        on_step(f"{steps.scenario.name}, {steps.backend}, warm-up")
        driver.step(steps.scenario)
    bandwidth.measure()
    peak.measure()
    for repetition in range(repetitions):
        samples.peaks.append(peak.measure())
        for steps, driver in runs if repetition % 2 == 0 else reversed(runs):
            on_step(f"{steps.scenario.name}, {steps.backend}")
            samples.bandwidths.append(bandwidth.measure())
            _sample(steps, driver, samples.bandwidths[-1], samples.peaks[-1])
    return samples


def _sample(steps: StepSamples, driver: Driver, bandwidth: float, peak: float) -> None:
    driver.step(steps.scenario)
    seconds, query_lens, seq_lens = driver.step(steps.scenario)
    cost = step_cost(driver.model_config, driver.itemsize, query_lens, seq_lens, driver.kv_itemsize)
    steps.seconds.append(seconds)
    steps.costs.append(cost)
    steps.floors_s.append(cost.floor_s(bandwidth, peak))
    steps.memory_s.append(cost.num_bytes / bandwidth)
    backend = driver.backend
    outside_s = seconds - backend.decoder_s
    backend.start()
    try:
        seconds, _, _ = driver.step(steps.scenario)
    finally:
        backend.stop()
    steps.operations.append(backend.times)
    if not backend.fuses:
        outside_s = seconds - backend.own_s - sum(operation.seconds for operation in backend.times.values())
    steps.outside_s.append(outside_s)
