"""Sampling math in C; see pdserve_kernels.sampling for what each function does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve_kernels.cpu import _native
from pdserve_kernels.cpu.packing import pointer

if TYPE_CHECKING:
    import numpy.typing as npt

    Row = npt.NDArray[np.float32]

_KERNELS = _native.find(_native.families()[0])


def argmax(logits_NV: torch.Tensor) -> list[int]:
    rows, vocab = logits_NV.shape
    return _native.argmax(_KERNELS, pointer(logits_NV, torch.float32), vocab, rows)


def draw(row: Row, *, temperature: float, top_k: int, top_p: float, min_p: float, random: float) -> int:
    return _native.draw(_pointer(row), row.size, temperature, top_k, top_p, min_p, random)


def log_probability(row: Row, token_id: int) -> tuple[float, float, int]:
    return _native.log_probability(_pointer(row), row.size, token_id)


def first_tokens(row: Row, count: int) -> list[int]:
    count = min(count, row.size)
    ids = np.empty(count, dtype=np.int64)
    if count:
        _native.first_tokens(_pointer(row), row.size, count, ids.ctypes.data)
    return ids.tolist()


def _pointer(row: Row) -> int:
    if row.dtype != np.float32 or not row.flags.c_contiguous:
        raise ValueError(f"contiguous float32 is wanted, not {row.dtype}")
    return row.ctypes.data
