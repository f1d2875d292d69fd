"""KV caches of 8-bit codes as tensors: where their scales lie, and rows to codes and back in torch.

Owns the shape of such a cache. A block is what an int8 or fp8 block is on its way between nodes (kv_blocks.py): rows of
D codes, then, from a multiple of four bytes on, a float32 scale for each row in the order of the rows. So the tensor
[B, G, L, 2, S, D] of the codes, int8 or float8_e4m3fn, is not contiguous from block to block, and its scales are found
from it alone. Roundings are those of kv_blocks.py, bit for bit.
"""

from __future__ import annotations

import math

import torch

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtypes of codes, and the code that the largest number of a row gets."""

SMALLEST = 1e-30
"""Below this a row is taken for zeros: its scale would not have an inverse."""


def is_quantized(kv_cache: torch.Tensor) -> bool:
    return kv_cache.dtype in LARGEST_CODE


def codes_of(blocks_NB: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The cache that lies in bytes.

    Args:
        blocks_NB: uint8, contiguous, a row a block.
        shape: [G, L, 2, S, D], or the order that the backend has them in.
    """
    return blocks_NB[:, : math.prod(shape)].view(dtype).view(-1, *shape)


def scales_of(kv_cache: torch.Tensor) -> torch.Tensor:
    """float32 [B, G, L, 2, S], over the same memory."""
    num_blocks, *shape, dim = kv_cache.shape
    rows = math.prod(shape)
    strides = [stride // dim for stride in kv_cache.stride()[1:-1]]
    scales = torch.empty(0, dtype=torch.float32, device=kv_cache.device)
    first = (kv_cache.storage_offset() + scales_at(rows * dim)) // 4
    return scales.set_(kv_cache.untyped_storage(), first, (num_blocks, *shape), (kv_cache.stride(0) // 4, *strides))


def scales_at(num_codes: int) -> int:
    """Byte of a block at which its scales begin."""
    return -(-num_codes // 4) * 4


def quantize(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] -> codes [..., D] and their scales, float32 [...]."""
    values = rows.float()
    most = values.abs().amax(-1)
    scales = torch.where(most < SMALLEST, 0.0, most / LARGEST_CODE[dtype])
    scaled = values * torch.where(scales > 0, 1 / scales, 0.0).unsqueeze(-1)
    if dtype == torch.int8:
        return scaled.round().to(dtype), scales
    return scaled.clamp(-448, 448).to(dtype), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows in ``dtype``."""
    return (codes.float() * scales.unsqueeze(-1)).to(dtype)
