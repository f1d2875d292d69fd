"""The landing pass against memcpy, on the same blocks in turns, on one core: ``python -m pdserve_bench.kv_landing``.

Knows the codec and memory; no connector and no node takes part.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pdserve_kernels.kv_blocks import Number
from pdserve_kv_transfer.codec import Lander, Packer
from pdserve_kv_transfer.wire import Wire
from pdserve_protocol.node import KVLayout
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

SMOLLM2 = KVLayout(block_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_bytes=368640)
MEMORY_BYTES = 128 << 20
REPETITIONS = 7


@dataclass(frozen=True, slots=True)
class PassSpeed:
    """GB/s of the sender's cache bytes; ``memcpy`` of as many bytes, in the same repetition. Medians."""

    name: str
    pack: float
    land: float
    memcpy: float

    @property
    def land_ratio(self) -> float:
        return self.land / self.memcpy


def pass_speed(name: str, wire: Wire, repetitions: int = REPETITIONS) -> PassSpeed:
    """Packs and lands blocks of more memory than caches hold, and copies them, turn about."""
    num_blocks = max(4, MEMORY_BYTES // wire.source.block_bytes)
    cache_NB = _memory(num_blocks, wire.source.block_bytes)
    _fill(cache_NB, wire.source.dtype)
    num_target_blocks = -(-num_blocks * wire.source.block_size // wire.target.block_size)
    target_NB = _memory(num_target_blocks, wire.target.block_bytes)
    slots_SB = _memory(num_blocks, wire.slot_bytes)
    packer, lander = Packer(cache_NB, wire, "r", "secret"), Lander(target_NB, wire, "r", "secret")
    tags: list[bytes] = []

    def pack() -> None:
        tags[:] = [
            packer.pack(block, "id", block, slots_SB[block] if packer.is_staged else None)
            for block in range(num_blocks)
        ]

    def land() -> None:
        for block in range(num_blocks):
            assert lander.land(slots_SB[block], tags[block], "id", block, block)

    def copy() -> None:
        size = wire.source.block_bytes
        for block in range(num_blocks):
            ctypes.memmove(copies_NB[block].ctypes.data, cache_NB[block].ctypes.data, size)

    copies_NB = _memory(num_blocks, wire.source.block_bytes)
    pack()
    if not packer.is_staged:
        slots_SB[:] = cache_NB
    times: dict[str, list[float]] = {"pack": [], "land": [], "memcpy": []}
    for _ in range(repetitions):
        for key, work in (("memcpy", copy), ("pack", pack), ("land", land)):
            times[key].append(_seconds(work))
    speeds = {key: cache_NB.nbytes / statistics.median(each) / 1e9 for key, each in times.items()}
    return PassSpeed(name, **speeds)


def wires(layout: KVLayout = SMOLLM2) -> dict[str, Wire]:
    """The kinds of wire by name, between two caches of this layout."""

    def wire(number: Number = Number.BF16, *, sealed: bool = False, digest: str = "xxh3-128") -> Wire:
        return Wire(source=layout, target=layout, number=number, digest=digest, sealed=sealed, context=b"")

    return {
        "as cached": wire(),
        "no digest": wire(digest="none"),
        "int8": wire(Number.INT8),
        "fp8": wire(Number.FP8),
        "sealed": wire(sealed=True),
        "sealed int8": wire(Number.INT8, sealed=True),
    }


def _memory(rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    mapping = mmap.mmap(-1, rows * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, dtype=np.uint8).reshape(rows, row_bytes)
    memory[:] = 1
    return memory


def _fill(cache_NB: npt.NDArray[np.uint8], dtype: str) -> None:
    """Random numbers of a plausible size: those of a cache, not bytes at random, some of which are NaN."""
    values = np.random.default_rng(0).standard_normal(cache_NB.nbytes // 4).astype(np.float32)
    if dtype == "bfloat16":
        halves = (values.view(np.uint32) >> 16).astype(np.uint16)
        cache_NB.reshape(-1)[:] = np.concatenate([halves, halves]).view(np.uint8)
    else:
        cache_NB.reshape(-1)[:] = values.view(np.uint8)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    argparse.ArgumentParser(prog="python -m pdserve_bench.kv_landing", description=__doc__).parse_args()
    table = Table("wire", "pack GB/s", "land GB/s", "memcpy GB/s", "land / memcpy", "wire bytes / cached bytes")
    for name, wire in wires().items():
        speed = pass_speed(name, wire)
        table.add_row(
            name,
            f"{speed.pack:.2f}",
            f"{speed.land:.2f}",
            f"{speed.memcpy:.2f}",
            f"{speed.land_ratio:.2f}",
            f"{wire.slot_bytes / wire.source.block_bytes:.3f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
