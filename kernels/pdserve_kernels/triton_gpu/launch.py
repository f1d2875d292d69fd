"""What the launches of all kernels have in common."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: TRITON_INTERPRET=1 when it was imported."""
    return not isinstance(tl.max, triton.JITFunction)


def dot_dtype(dtype: torch.dtype) -> Any:
    """What matrix products of numbers of ``dtype`` take; the interpreter cannot multiply matrices of bfloat16."""
    return tl.float32 if is_interpreted() else _DTYPES[dtype]


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def padded(size: int, least: int = 1) -> int:
    """The next power of two: what a block of a kernel must be."""
    return max(int(triton.next_power_of_2(size)), least)
