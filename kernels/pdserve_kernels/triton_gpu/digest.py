"""pdserve_kernels.digest on a GPU, alone or on the way of a copy: each word is read once.

Letters: N, K rows of the source and the target, C rows that are read, W words of 32 bits in a row.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from pdserve_kernels.digest import LANE_FACTORS, NUM_LANES, PLACE_FACTOR, WORD_FACTOR
from pdserve_kernels.triton_gpu.launch import ceil_div

_WORDS = 4096


@triton.jit
def _copy_and_digest(
    source_ptr,
    target_ptr,
    source_rows_ptr,
    target_rows_ptr,
    sums_ptr,
    num_words,
    source_stride,
    target_stride,
    COPIES: tl.constexpr,
    WORDS: tl.constexpr,
    PLACE_FACTOR: tl.constexpr,
    WORD_FACTOR: tl.constexpr,
    FACTOR_0: tl.constexpr,
    FACTOR_1: tl.constexpr,
    FACTOR_2: tl.constexpr,
    FACTOR_3: tl.constexpr,
):
    index = tl.program_id(0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    exists = word < num_words
    source_row = tl.load(source_rows_ptr + index).to(tl.int64)
    value = tl.load(source_ptr + source_row * source_stride + word, mask=exists, other=0)
    if COPIES:
        target_row = tl.load(target_rows_ptr + index).to(tl.int64)
        tl.store(target_ptr + target_row * target_stride + word, value, mask=exists)
    mixed = value.to(tl.uint32, bitcast=True) ^ ((word + 1).to(tl.uint32, bitcast=True) * PLACE_FACTOR)
    mixed = mixed * WORD_FACTOR
    mixed = mixed ^ (mixed >> 15)
    sums = sums_ptr + index * 4
    _add_lane(sums, mixed * FACTOR_0, exists)
    _add_lane(sums + 1, mixed * FACTOR_1, exists)
    _add_lane(sums + 2, mixed * FACTOR_2, exists)
    _add_lane(sums + 3, mixed * FACTOR_3, exists)


@triton.jit
def _add_lane(sum_ptr, mixed, exists):
    lane = (mixed ^ (mixed >> 16)).to(tl.int32, bitcast=True)
    # In 64 bits, since the interpreter does not let a sum wrap round.
    total = tl.sum(tl.where(exists, lane, 0).to(tl.int64), 0)
    tl.atomic_add(sum_ptr, total.to(tl.int32))


def copy_and_digest(
    source_NW: torch.Tensor,
    source_rows_C: torch.Tensor,
    target_KW: torch.Tensor | None = None,
    target_rows_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """Digests rows, and copies them on if there is a target; what is digested are the words that are copied.

    Args:
        source_NW, target_KW: int32, words of a row side by side.
        source_rows_C, target_rows_C: int32; no target twice.

    Returns:
        int32 [C, 4] on the device; ``digests_of`` makes bytes of them.
    """
    num_rows, num_words = len(source_rows_C), source_NW.shape[1]
    sums_C4 = torch.zeros(num_rows, NUM_LANES, dtype=torch.int32, device=source_NW.device)
    copies = target_KW is not None and target_rows_C is not None
    _copy_and_digest[(num_rows, ceil_div(num_words, _WORDS))](
        source_NW,
        target_KW if copies else source_NW,
        source_rows_C,
        target_rows_C if copies else source_rows_C,
        sums_C4,
        num_words,
        source_NW.stride(0),
        target_KW.stride(0) if target_KW is not None else 0,
        COPIES=copies,
        WORDS=_WORDS,
        PLACE_FACTOR=PLACE_FACTOR,
        WORD_FACTOR=WORD_FACTOR,
        FACTOR_0=LANE_FACTORS[0],
        FACTOR_1=LANE_FACTORS[1],
        FACTOR_2=LANE_FACTORS[2],
        FACTOR_3=LANE_FACTORS[3],
    )
    return sums_C4


def digests_of(sums_C4: torch.Tensor) -> list[bytes]:
    """16 bytes a row; waits for the device."""
    return [row.tobytes() for row in sums_C4.cpu().numpy().astype(np.dtype("<i4"))]
