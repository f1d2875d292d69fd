"""A summary as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_bench.serve.config import ClosedLoop
from pdserve_bench.tables import Table, number

if TYPE_CHECKING:
    from pdserve_bench.serve.config import ServeBench
    from pdserve_bench.serve.records import Latency
    from pdserve_bench.serve.server import ServedModel
    from pdserve_bench.serve.summary import Summary
    from pdserve_bench.stats import Distribution

LATENCY_NAMES: dict[Latency, str] = {
    "ttft": "TTFT",
    "second": "time to second token",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
}
_SEVERAL_TOKENS = 1.02


def describe_load(bench: ServeBench) -> str:
    if isinstance(bench.load, ClosedLoop):
        return f"{bench.num_prompts} requests, concurrency {bench.load.concurrency}"
    process: str = bench.load.process
    if process == "gamma":
        process += f" {bench.load.burstiness:g}"
    return f"{bench.num_prompts} requests, {bench.load.rate:g}/s ({process})"


def tables(bench: ServeBench, model: ServedModel, summary: Summary) -> list[Table]:
    """Latencies, rates, failures, and processes that were watched."""
    found = [_latencies(bench, model, summary), _rates(summary)]
    if summary.failures:
        rows = [[kind, str(count)] for kind, count in summary.failures.items()]
        found.append(Table(title="failures", columns=["kind", "requests"], rows=rows))
    if summary.processes:
        found.append(_processes(summary))
    return found


def _latencies(bench: ServeBench, model: ServedModel, summary: Summary) -> Table:
    def row(name: str, values: Distribution | None) -> list[str]:
        if values is None:
            return [name, "-", "-", "-", "-", "-"]
        numbers = (values.mean, values.p50, values.p90, values.p99, values.max)
        return [name, *(number(value * 1e3) for value in numbers)]

    note = ""
    if summary.tokens_per_chunk > _SEVERAL_TOKENS:
        note = f"A chunk held {summary.tokens_per_chunk:.2f} tokens on average: ITL is between chunks."
    return Table(
        title=f"{bench.label or model.name}, {describe_load(bench)}",
        columns=["ms", "mean", "p50", "p90", "p99", "max"],
        rows=[row(name, summary.latencies[what]) for what, name in LATENCY_NAMES.items()],
        note=note,
    )


def _rates(summary: Summary) -> Table:
    rows = [
        ["answered requests", f"{summary.num_answered} of {summary.num_requests}"],
        ["duration", f"{summary.duration_s:.2f} s"],
        ["prompt tokens", f"{summary.num_prompt_tokens:,}"],
        ["output tokens", f"{summary.num_output_tokens:,}"],
        ["requests per second", number(summary.requests_per_s)],
        ["output tokens per second", number(summary.output_tokens_per_s)],
        ["all tokens per second", number(summary.total_tokens_per_s)],
    ]
    if summary.goodput_per_s is not None and summary.goodput_share is not None:
        rows.append(["goodput, requests per second", number(summary.goodput_per_s)])
        rows.append(["requests that kept every objective", f"{summary.goodput_share:.1%}"])
    if summary.lateness_s is not None:
        rows.append(["client sent late by, p99", f"{number(summary.lateness_s.p99 * 1e3)} ms"])
    itl = summary.latencies["itl"]
    if itl is not None and itl.p50 > 0:
        rows.append(["ITL, p99 over median", f"{itl.p99 / itl.p50:.2f}"])
    full = summary.full_itl
    if full is not None and full.p50 > 0:
        ratio = f"{number(full.p99 * 1e3)} / {number(full.p50 * 1e3)} = {full.p99 / full.p50:.2f}"
        rows.append([f"the same while {summary.most_streams} decode, ms", ratio])
    if summary.num_beside:
        rows.append(["other requests meanwhile", str(summary.num_beside)])
    rows.append(["client's processor time", f"{summary.client_cpu_s:.2f} s"])
    return Table(title="rates", columns=["", ""], rows=rows)


def _processes(summary: Summary) -> Table:
    rows = [
        [
            f"{process.name.removeprefix('pdserve_').removesuffix('.main')} ({process.pid})",
            f"{process.cpu_s:.2f}",
            number(process.cpu_s_per_1000_tokens * 1e3),
            number(process.cpu_s_per_request * 1e3),
            number(process.rss_bytes / 2**20),
        ]
        for process in summary.processes
    ]
    columns = ["process", "CPU s", "CPU ms per 1,000 tokens", "CPU ms per request", "resident MiB"]
    return Table(title="processes", columns=columns, rows=rows)
