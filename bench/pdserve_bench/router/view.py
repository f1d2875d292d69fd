"""The result as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_bench.tables import Table, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_bench.router.config import RouterBench
    from pdserve_bench.router.summary import PhaseCost


def table(bench: RouterBench, costs: Sequence[PhaseCost], core: int) -> Table:
    """A row a phase."""
    rows = [
        [
            cost.phase.name,
            f"{cost.chunks_per_s:,.0f}" if cost.phase.stream else "-",
            number(cost.requests_per_s),
            number(cost.cpu_ms_per_1000_chunks),
            number(cost.cpu_ms_per_request),
            f"{cost.router_busy:.0%}",
        ]
        for cost in costs
    ]
    return Table(
        title=f"{bench.label or 'router'}: {bench.concurrency} connections, the router on core {core}",
        columns=["load", "tokens/s", "requests/s", "cpu ms / 1,000 tokens", "cpu ms / request", "router's core"],
        rows=rows,
        note="tokens/s: streamed, a chunk each; cpu: the router's, all its threads; each request through both nodes",
    )
