"""What `pdserve bench kv` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve_protocol.door import Address


class Way(msgspec.Struct, frozen=True, array_like=True):
    """A connector and what UCX may use under it.

    Attributes:
        transports: UCX_TLS; empty where UCX chooses.
    """

    connector: str
    transports: str = ""

    @property
    def name(self) -> str:
        return f"{self.connector}/{self.transports}" if self.transports else self.connector


class Point(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Some writes at a time, of some blocks each.

    Attributes:
        concurrency: writes that are started together.
    """

    block_bytes: int
    num_blocks: int
    concurrency: int

    @property
    def total_blocks(self) -> int:
        return self.num_blocks * self.concurrency

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.total_blocks

    @property
    def name(self) -> str:
        times = f"{self.concurrency} x " if self.concurrency > 1 else ""
        return f"{times}{self.num_blocks} x {self.block_bytes:,} B"


@dataclass(frozen=True, kw_only=True)
class KvBench:
    """One run.

    Attributes:
        wire_dtypes: of the numbers on the way; "auto" is as they are in the cache, bfloat16.
        listen: only receive, for a run on another host; then all but the address is that run's.
        connect: where a host listens; None for both processes on this one.
        mooncake: a Python interpreter that can import Mooncake's transfer engine.
    """

    ways: tuple[Way, ...]
    block_bytes: tuple[int, ...]
    num_blocks: tuple[int, ...]
    concurrency: tuple[int, ...]
    wire_dtypes: tuple[str, ...]
    repetitions: int
    listen: Address | None
    connect: Address | None
    cluster_key: str | None
    mooncake: Path | None
    label: str
    csv_path: Path | None
    json_path: Path | None
    plot_path: Path | None


def points(bench: KvBench) -> list[Point]:
    return [
        Point(size, number, together)
        for size in bench.block_bytes
        for number in bench.num_blocks
        for together in bench.concurrency
    ]
