"""Results as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_bench.handoff.measures import BATCH
from pdserve_bench.tables import Table, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_bench.handoff.config import HandoffBench
    from pdserve_bench.handoff.measures import Digests, Gap, Grants, PolicyCost


def gap_table(bench: HandoffBench, gap: Gap) -> Table:
    rows = [
        [name, number(value.p50 * 1000), number(value.p90 * 1000), number(value.max * 1000)]
        for name, value in (
            ("token 0 to token 1", gap.first_gap),
            ("a decode step", gap.step),
            ("beyond a step", gap.beyond_step),
        )
    ]
    parts = ", ".join(f"{name} {number(seconds * 1000)}" for name, seconds in gap.parts.items())
    return Table(
        title=f"gap before the second token, idle, {bench.input_len} tokens in, {bench.connector}: ms",
        columns=["", "median", "p90", "max"],
        rows=rows,
        note=f"medians by the decode node's clock: {parts}",
    )


def grants_table(grants: Grants) -> Table:
    values = (grants.mean, grants.p99_at_most, grants.step.p50)
    ratio = f"{grants.p99_at_most / grants.step.p50:.2f}" if grants.step.p50 else "-"
    row = [*(number(value * 1000) for value in values), ratio]
    return Table(
        title=f"offer to grant, {grants.running:g} of {BATCH} requests running: ms",
        columns=["", "mean", "p99 at most", "decode step, median", "p99 / step"],
        rows=[["grants", *row]],
        note="from the offer's sending to the grant's receipt, by the prefill node's clock",
    )


def policies_table(bench: HandoffBench, costs: Sequence[PolicyCost]) -> Table:
    rows = [
        [
            cost.policy,
            number(cost.reserved_block_seconds),
            number(cost.reserved_most),
            number(cost.ttft.p50),
            number(cost.second.p50),
            number(cost.gap.p50 * 1000),
            number(cost.gap.max * 1000),
            number(cost.tokens_per_s),
        ]
        for cost in costs
    ]
    return Table(
        title=f"grant policies, {bench.concurrency} requests at a time, {bench.input_len} in, {bench.output_len} out",
        columns=["policy", "idle block s", "most blocks", "ttft s", "second token s", "gap ms", "gap max", "tokens/s"],
        rows=rows,
        note="idle: reserved on the decode node for requests that do not decode yet; gap: first to second token",
    )


def digests_table(digests: Digests) -> Table:
    rows = [
        [str(turn), number(on), number(off), f"{on / off:.3f}"]
        for turn, (on, off) in enumerate(zip(digests.on, digests.off, strict=True), 1)
    ]
    return Table(
        title=f"digests on over off: {digests.ratio:.3f}, the mean of the medians of both halves",
        columns=["turn", "on, tokens/s", "off, tokens/s", "on / off"],
        rows=rows,
    )
