"""The reference of kv_blocks: conversion of rows in numpy, bit for bit what the C kernel does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    import numpy.typing as npt

    from pdserve_kernels.kv_blocks import Rows

    Floats = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

_BF16, _F32, _INT8, _FP8 = range(4)
_LARGEST_CODE = {_INT8: np.float32(127), _FP8: np.float32(448)}
_SMALLEST = np.float32(1e-30)


def convert(
    source: Rows,
    target: Rows,
    extents: tuple[int, int, int, int],
    source_B: Bytes,
    target_B: Bytes,
    source_token: int,
    target_token: int,
) -> None:
    """Rows [heads, layers, K|V, tokens] from one block to another."""
    source_codes, source_scales = _views(source, extents, source_B, source_token)
    target_codes, target_scales = _views(target, extents, target_B, target_token)
    if source.number == target.number:
        target_codes[:] = source_codes
        if source_scales is not None and target_scales is not None:
            target_scales[:] = source_scales
        return
    values = _load(source_codes, source.number)
    if source_scales is not None:
        values = values * source_scales[..., None]
    if target_scales is None:
        target_codes[:] = to_bf16(values) if target.number == _BF16 else values
        return
    most = np.abs(values).max(axis=-1)
    scales = np.where(most < _SMALLEST, np.float32(0), most / _LARGEST_CODE[target.number])
    with np.errstate(divide="ignore"):
        inverses = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
    target_scales[:] = scales
    target_codes[:] = _codes(values * inverses[..., None], target.number)


def _views(
    rows: Rows, extents: tuple[int, int, int, int], block_B: Bytes, token: int
) -> tuple[npt.NDArray[np.generic], Floats | None]:
    dtype = (np.uint16, np.float32, np.int8, np.uint8)[rows.number]
    size = np.dtype(dtype).itemsize
    first = token * rows.strides[3]
    numbers = block_B[first * rows.dim * size :]
    steps = tuple(stride * rows.dim * size for stride in rows.strides)
    codes = as_strided(numbers[: numbers.nbytes // size * size].view(dtype), (*extents, rows.dim), (*steps, size))
    if rows.scales_at is None:
        return codes, None
    scales = block_B[rows.scales_at + 4 * first :].view(np.float32)
    return codes, as_strided(scales, extents, tuple(4 * stride for stride in rows.strides))


def _load(codes: npt.NDArray[np.generic], number: int) -> Floats:
    if number == _BF16:
        return np.left_shift(codes.astype(np.uint32), 16).view(np.float32)
    if number == _FP8:
        return E4M3_VALUES[codes.astype(np.uint8)]
    return codes.astype(np.float32)


def _codes(scaled: Floats, number: int) -> npt.NDArray[np.generic]:
    if number == _INT8:
        return np.rint(scaled).astype(np.int8)
    return to_e4m3(np.clip(scaled, np.float32(-448), np.float32(448)))


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """To the nearest even, as bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def to_e4m3(values: Floats) -> npt.NDArray[np.uint8]:
    """The nearest code, of two the even one; |values| <= 448."""
    magnitudes = np.abs(values)
    positive = E4M3_VALUES[:127]
    above = np.clip(np.searchsorted(positive, magnitudes), 1, 126)
    below = above - 1
    gap_below, gap_above = magnitudes - positive[below], positive[above] - magnitudes
    nearer = np.where(gap_below < gap_above, below, above)
    tie = gap_below == gap_above
    nearer = np.where(tie, np.where(below % 2 == 0, below, above), nearer)
    return (nearer | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    magnitudes = np.where(exponents == 0, fractions / 8 * 2.0**-6, (1 + fractions / 8) * 2.0 ** (exponents - 7.0))
    return np.where(codes & 0x80, -magnitudes, magnitudes).astype(np.float32)


E4M3_VALUES = _e4m3_values()
"""float32 [256], what each code means; NaN (0x7F, 0xFF) is never made."""
