"""One run of `pdserve bench kernels` from what is asked for to files."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import torch
from pdserve_engine.weights import resolve_model
from pdserve_kernels.errors import KernelError
from pdserve_kernels.select import select_backend
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve_bench.errors import BadOption
from pdserve_bench.kernels.config import scenarios
from pdserve_bench.kernels.driver import Driver
from pdserve_bench.kernels.floors import MatrixPeak, ReadBandwidth
from pdserve_bench.kernels.measure import measure, steps_of_a_scenario
from pdserve_bench.kernels.plot import plot
from pdserve_bench.kernels.results import result_of
from pdserve_bench.kernels.view import describe_threads, tables
from pdserve_bench.machine import Machine
from pdserve_bench.reports import check_plot_path, write_json, write_plot
from pdserve_bench.tables import for_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve_bench.kernels.config import KernelsBench
    from pdserve_bench.kernels.measure import Samples

_SEED = 0


def bench_kernels(bench: KernelsBench, *, console: Console, log: Console) -> int:
    """Measures, prints, writes.

    Args:
        console: the result goes here.
        log: progress goes here.

    Raises:
        BadOption: a backend or a length that cannot be.
        ModelError, WeightsError: the model cannot be used.
    """
    check_plot_path(bench.plot_path)
    if not scenarios(bench):
        raise BadOption("--batch-sizes and --prefill-lens", "", "at least one of them is expected")
    machine = Machine()
    torch.set_num_threads(bench.threads)
    samples, numerics = _measure(bench, log)
    result = result_of(samples, bench.baseline if bench.baseline != bench.backend else None)
    shown = tables(bench, result, bench.backend)
    if bench.json_path is not None:
        head = {"benchmark": "kernels", "label": bench.label, "machine": machine, "numerics": numerics}
        config = {key: value for key, value in vars(bench).items() if key not in ("json_path", "plot_path", "label")}
        write_json(bench.json_path, head | {"config": config, "result": result})
    if bench.plot_path is not None:
        title = f"{bench.label or bench.model}, {bench.dtype}, {bench.backend}, {describe_threads(bench.threads)}"
        write_plot(bench.plot_path, title, plot(result, bench.backend, bench.baseline, title), shown)
    for table in shown:
        console.print(for_terminal(table))
    return 0


def _measure(bench: KernelsBench, log: Console) -> tuple[Samples, dict[str, str]]:
    """Samples, and the fingerprint of each backend."""
    folder, wanted = resolve_model(bench.model), scenarios(bench)
    names = list(dict.fromkeys(name for name in (bench.backend, bench.baseline) if name is not None))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=log, refresh_per_second=2, disable=not log.is_terminal) as progress:
        task = progress.add_task("models", total=len(names) * len(wanted) * (bench.repetitions + 1))
        drivers = {}
        for name in names:
            num_steps = steps_of_a_scenario(bench.repetitions)
            try:
                drivers[name] = Driver(bench, folder, name, num_steps, Random(_SEED))
            except KernelError as error:
                raise BadOption("--backend or --baseline", name, str(error)) from error
        samples = measure(
            drivers,
            wanted,
            bench.repetitions,
            ReadBandwidth(),
            MatrixPeak(getattr(torch, bench.dtype), [select_backend(name) for name in names]),
            lambda text: progress.update(task, description=text, advance=1),
        )
    return samples, {name: driver.worker.numerics for name, driver in drivers.items()}
