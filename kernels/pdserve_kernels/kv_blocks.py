"""Bytes of KV blocks on their way between two caches: digest, copy, and rows of numbers from one layout to another.

Knows arrays of bytes and where rows lie in them; what travels, and why, is others' business. In C where the extension
is installed, with the GIL released; otherwise numpy and xxhash, with the same results. Imports no torch.

Letters: G KV heads, L layers, S tokens of a block, D dimension of a head, B bytes of a block.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import xxhash

from pdserve_kernels import kv_blocks_reference as reference
from pdserve_kernels.cpu import is_built

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

if is_built():
    from pdserve_kernels.cpu import _native
else:
    _native = None  # type: ignore[assignment]

_DIGEST_MIN = 241
"""Bytes from which on the C kernel digests; XXH3 has other algorithms for fewer."""

MAX_DIM = 1024
"""Numbers of a row at most."""


class Number(IntEnum):
    """How a number is stored. INT8 and FP8 (e4m3) have a float32 scale for each row: value = code * scale."""

    BF16 = 0
    F32 = 1
    INT8 = 2
    FP8 = 3

    @property
    def size(self) -> int:
        """In bytes."""
        return (2, 4, 1, 1)[self]

    @property
    def scaled(self) -> bool:
        return self in (Number.INT8, Number.FP8)


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of D numbers of one block lie.

    Attributes:
        strides: rows from one head, layer, K|V and token to the next.
        scales_at: byte at which the float32 scales begin, one a row, in the order of the rows; None without.
    """

    number: Number
    dim: int
    strides: tuple[int, int, int, int]
    scales_at: int | None = None


def digest(data_B: npt.NDArray[np.uint8]) -> bytes:
    """XXH3-128 of contiguous bytes, 16 bytes."""
    if _native is None or data_B.nbytes < _DIGEST_MIN:
        return xxhash.xxh3_128_digest(data_B.data)
    return _native.digest(data_B.ctypes.data, data_B.nbytes)


def copy_digest(source_B: npt.NDArray[np.uint8], target_B: npt.NDArray[np.uint8]) -> bytes:
    """Copies contiguous bytes and digests the copy: what changes in ``source_B`` meanwhile shows in neither alone."""
    if _native is None or source_B.nbytes < _DIGEST_MIN:
        target_B[:] = source_B
        return xxhash.xxh3_128_digest(target_B.data)
    return _native.copy_digest(source_B.ctypes.data, target_B.ctypes.data, source_B.nbytes)


class Conversion:
    """Rows of blocks of one layout into blocks of another.

    Args:
        extents: heads, layers, and 2 for K|V.
    """

    def __init__(self, source: Rows, target: Rows, extents: tuple[int, int, int]) -> None:
        if source.dim != target.dim or not 0 < source.dim <= MAX_DIM:
            raise ValueError(f"rows of {source.dim} and {target.dim} numbers")
        self._source = source
        self._target = target
        self._extents = extents
        self._prepared = lru_cache(maxsize=64)(self._prepare)

    def run(
        self,
        source_B: npt.NDArray[np.uint8],
        target_B: npt.NDArray[np.uint8],
        source_token: int,
        target_token: int,
        count: int,
    ) -> None:
        """Converts ``count`` tokens of one block, from ``source_token`` on, into another from ``target_token`` on."""
        if _native is None:
            reference.convert(
                self._source, self._target, (*self._extents, count), source_B, target_B, source_token, target_token
            )
            return
        rows = self._prepared(count)
        rows.from_, rows.from_scales = _begin(self._source, source_B, source_token)
        rows.to, rows.to_scales = _begin(self._target, target_B, target_token)
        _native.convert_rows(ctypes.addressof(rows))

    def _prepare(self, count: int) -> _RowsStruct:
        axes = list(zip((*self._extents, count), self._source.strides, self._target.strides, strict=True))
        axes = [axis for axis in axes if axis[0] > 1]
        axes.sort(key=lambda axis: axis[2], reverse=True)
        merged: list[tuple[int, int, int]] = []
        for extent, source_stride, target_stride in axes:
            if merged and merged[-1][1:] == (extent * source_stride, extent * target_stride):
                merged[-1] = (merged[-1][0] * extent, source_stride, target_stride)
            else:
                merged.append((extent, source_stride, target_stride))
        merged = [(1, 1, 1)] * (4 - len(merged)) + merged
        rows = _RowsStruct(from_number=self._source.number, to_number=self._target.number, dim=self._source.dim)
        for index, (extent, source_stride, target_stride) in enumerate(merged):
            rows.extent[index] = extent
            rows.from_stride[index] = source_stride
            rows.to_stride[index] = target_stride
        return rows


class _RowsStruct(ctypes.Structure):
    """rows_t of csrc/landing.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("from_", "to", "from_scales", "to_scales")],
        *[(name, ctypes.c_int64) for name in ("from_number", "to_number", "dim")],
        *[(name, ctypes.c_int64 * 4) for name in ("extent", "from_stride", "to_stride")],
    ]


def _begin(rows: Rows, block_B: npt.NDArray[np.uint8], token: int) -> tuple[int, int]:
    """Addresses of a token's first row and its scale."""
    row = token * rows.strides[3]
    address = block_B.ctypes.data
    values = address + row * rows.dim * rows.number.size
    return values, 0 if rows.scales_at is None else address + rows.scales_at + 4 * row
