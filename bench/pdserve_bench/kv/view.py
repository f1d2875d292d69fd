"""The result as tables, and as CSV."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from pdserve_bench.tables import Table, number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve_bench.kv.results import KvResult

NAMES = {
    "memcpy": "memcpy",
    "socket": "one raw socket stream",
    "nixl": "raw NIXL, one buffer",
    "mooncake": "Mooncake, TCP",
    "connector": "connector, write only",
    "mover auto": "mover: digests, write",
}
_OVER = ("nixl", "socket", "mooncake", "memcpy")


def name_of(what: str) -> str:
    return NAMES.get(what, f"mover: {what.removeprefix('mover ')} on the wire")


def tables(label: str, results: Sequence[KvResult]) -> list[Table]:
    """One for each connector."""
    return [
        Table(
            title=f"{label or 'KV blocks between two processes'}: {way}",
            columns=["", "blocks", "p50, us", "p99, us", "GB/s", "/ NIXL", "/ socket", "/ Mooncake", "/ memcpy"],
            rows=[_row(result) for result in results if result.way == way],
            note="GB/s of the median; / x: over x, median of the ratios within each repetition",
        )
        for way in dict.fromkeys(result.way for result in results)
    ]


def _row(result: KvResult) -> list[str]:
    return [
        name_of(result.what),
        result.point.name,
        number(result.seconds.p50 * 1e6),
        number(result.seconds.p99 * 1e6),
        number(result.bytes_per_s / 1e9),
        *(f"{result.over[name]:.2f}" if name in result.over else "-" for name in _OVER),
    ]


def write_csv(path: Path, results: Sequence[KvResult]) -> None:
    """One line for each result."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(
            ["connector", "what", "block_bytes", "blocks", "concurrency", "p50_s", "p99_s", "bytes_per_s"]
            + [f"over_{name}" for name in _OVER]
        )
        for result in results:
            point, seconds = result.point, result.seconds
            rows.writerow(
                [result.way, result.what, point.block_bytes, point.num_blocks, point.concurrency]
                + [seconds.p50, seconds.p99, result.bytes_per_s]
                + [result.over.get(name, "") for name in _OVER]
            )
