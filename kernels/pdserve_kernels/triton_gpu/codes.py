"""8-bit codes of a quantized cache: numbers to codes and back inside kernels, rounded as kv_blocks.py rounds.

With bits alone, so that a GPU without instructions for e4m3 does it too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve_kernels.quantized_cache import LARGEST_CODE, is_quantized, scales_of

PLAIN = 0.0
"""In the place of the largest code where the cache holds numbers."""


def cache_arguments(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, float]:
    """What kernels take of a cache: numbers or codes, scales, scales from block to block, and the largest code.

    The largest code is 127 for int8, 448 for e4m3 and PLAIN for a cache of numbers, whose scales are never read.
    """
    if not is_quantized(kv_cache):
        return kv_cache, kv_cache, 0, PLAIN
    scales = scales_of(kv_cache)
    return kv_cache.view(torch.int8), scales, scales.stride(0), LARGEST_CODE[kv_cache.dtype]


@triton.jit
def scale_of(first, second, LARGEST: tl.constexpr):
    """The scale of a row in two halves of float32."""
    most = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
    return tl.where(most < 1e-30, 0.0, most / LARGEST)


@triton.jit
def encode(values, scale, LARGEST: tl.constexpr):
    """float32 -> int8, which for e4m3 holds its bits."""
    values = values * tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)
    if LARGEST == 127.0:
        # The addition rounds to the nearest even and leaves the integer in the low bits.
        codes = (values + 12582912.0).to(tl.int32, bitcast=True)
    else:
        bits = tl.minimum(tl.maximum(values, -448.0), 448.0).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        denormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        codes = tl.where(magnitude < (121 << 23), denormal, normal) | ((bits >> 24) & 0x80)
    return codes.to(tl.int8)


@triton.jit
def decode(codes, LARGEST: tl.constexpr):
    """int8 -> float32, without the scale."""
    if LARGEST == 127.0:
        numbers = codes.to(tl.float32)
    else:
        code = codes.to(tl.int32)
        magnitude = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        numbers = tl.where(code < 0, -magnitude, magnitude)
    return numbers
