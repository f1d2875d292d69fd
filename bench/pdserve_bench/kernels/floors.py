"""What this machine can do now: bytes read per second, and the fastest matrix product.

Both are the best of several ways, since a floor that is measured badly flatters what is compared with it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from pdserve_kernels import cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve_kernels.interface import Backend

# Far more than any cache holds.
_READ_BYTES = 512 << 20
_MATRIX_SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (512, 4096, 2048))


class ReadBandwidth:
    """Measures with the current number of threads. Holds a buffer of 512 MiB."""

    def __init__(self, num_bytes: int = _READ_BYTES) -> None:
        self._numbers = torch.rand(num_bytes // 4, dtype=torch.float32)
        rows = self._numbers.view(-1, 1024)
        vector = torch.ones(1024)
        self._ways: list[Callable[[], object]] = [
            lambda: torch.dot(self._numbers, self._numbers),
            lambda: torch.mv(rows, vector),
            lambda: self._numbers.sum(),
            lambda: self._numbers.max(),
        ]

    def measure(self) -> float:
        """Bytes per second of one pass, by the way that is fastest this time."""
        bandwidth = self._numbers.numel() * 4 / min(_seconds(way) for way in self._ways)
        if cpu.is_built():
            from pdserve_kernels.cpu.memory import read_bandwidth

            bandwidth = max(bandwidth, read_bandwidth(repeats=2))
        return bandwidth


class MatrixPeak:
    """Measures products of matrices of ``dtype`` with the current number of threads, through torch and ``backends``."""

    def __init__(self, dtype: torch.dtype, backends: Sequence[Backend]) -> None:
        self._products: list[tuple[float, Callable[[], object]]] = []
        for rows, inner, columns in _MATRIX_SHAPES:
            x = torch.randn(rows, inner).to(dtype)
            weight = torch.randn(columns, inner).to(dtype)
            self._products += [(2.0 * rows * inner * columns, way) for way in _ways(x, weight, backends)]

    def measure(self) -> float:
        """FLOPs per second of the product that is fastest this time."""
        return max(flops / _seconds(product) for flops, product in self._products)


def _ways(x: torch.Tensor, weight: torch.Tensor, backends: Sequence[Backend]) -> list[Callable[[], object]]:
    ways: list[Callable[[], object]] = [lambda: F.linear(x, weight)]
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    return ways + [partial(backend.linear, x, backend.pack_linear(weight)) for backend in backends]


def _seconds(way: Callable[[], object]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start
