"""One run of `pdserve bench handoff` from what is asked for to files."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve_bench.handoff.measures import (
    measure_digests,
    measure_gap,
    measure_grants,
    measure_policies,
    num_requests,
)
from pdserve_bench.handoff.view import digests_table, gap_table, grants_table, policies_table
from pdserve_bench.machine import Machine
from pdserve_bench.reports import write_json
from pdserve_bench.tables import for_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from pdserve_bench.handoff.config import HandoffBench
    from pdserve_bench.serve.records import RequestRecord
    from pdserve_bench.tables import Table


def bench_handoff(bench: HandoffBench, *, console: Console, log: Console) -> int:
    """Measures, prints, writes.

    Args:
        console: the result goes here.
        log: progress goes here.

    Raises:
        BenchError: nothing could be measured.
    """
    return asyncio.run(_run(bench, console, log))


async def _run(bench: HandoffBench, console: Console, log: Console) -> int:
    machine, results = Machine(), {}
    for measure in bench.measures:
        result, table = await _measure(bench, measure, log)
        results[measure] = result
        console.print(for_terminal(table))
    if bench.json_path is not None:
        config = {key: value for key, value in vars(bench).items() if key not in ("json_path", "label")}
        head = {"benchmark": "handoff", "label": bench.label, "machine": machine, "config": config}
        write_json(bench.json_path, head | {"result": results})
    return 0


async def _measure(bench: HandoffBench, measure: str, log: Console) -> tuple[Any, Table]:
    total = num_requests(bench, measure)
    match measure:
        case "gap":
            with _progress(log, measure, total) as on_record:
                gap = await measure_gap(bench, on_record)
            return gap, gap_table(bench, gap)
        case "grants":
            with _progress(log, measure, total) as on_record:
                grants = await measure_grants(bench, on_record)
            return grants, grants_table(grants)
        case "policies":
            with _progress(log, measure, total) as on_record:
                costs = await measure_policies(bench, on_record)
            return costs, policies_table(bench, costs)
        case _:
            with _progress(log, measure, total) as on_record:
                digests = await measure_digests(bench, on_record)
            return digests, digests_table(digests)


@contextmanager
def _progress(log: Console, title: str, total: int) -> Iterator[Callable[[RequestRecord], None]]:
    """A bar that counts answers."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn rarely: the client shares the machine with what it measures.
    with Progress(*columns, console=log, refresh_per_second=2, disable=not log.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda record: bar.advance(task)
