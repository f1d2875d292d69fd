"""Norms of q and k, RoPE, and keys and values into the paged cache, in one pass over qkv."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pdserve_kernels.triton_gpu.codes import cache_arguments, encode, scale_of
from pdserve_kernels.triton_gpu.launch import padded

if TYPE_CHECKING:
    from pdserve_kernels.interface import AttentionMetadata, AttentionSpec


@triton.jit
def _norm_rotate_write(
    qkv_ptr,
    q_ptr,
    cache_ptr,
    scales_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    qkv_stride,
    block_stride,
    head_stride,
    layer_offset,
    value_offset,
    scales_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    WITH_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    dim = tl.arange(0, PADDED_HALF)
    mask = dim < HALF_DIM
    source = qkv_ptr + token.to(tl.int64) * qkv_stride + head * 2 * HALF_DIM + dim
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    if not is_value:
        if WITH_NORM:
            squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
            scale = 1.0 / tl.sqrt(squares / (2 * HALF_DIM) + eps)
            if is_query:
                first *= scale * tl.load(q_norm_ptr + dim, mask=mask, other=0.0).to(tl.float32)
                second *= scale * tl.load(q_norm_ptr + HALF_DIM + dim, mask=mask, other=0.0).to(tl.float32)
            else:
                first *= scale * tl.load(k_norm_ptr + dim, mask=mask, other=0.0).to(tl.float32)
                second *= scale * tl.load(k_norm_ptr + HALF_DIM + dim, mask=mask, other=0.0).to(tl.float32)
        angle = tl.load(positions_ptr + token) * HALF_DIM + dim
        cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    first = first.to(qkv_ptr.dtype.element_ty)
    second = second.to(qkv_ptr.dtype.element_ty)
    if is_query:
        target = q_ptr + (token * NUM_HEADS + head) * 2 * HALF_DIM + dim
        tl.store(target, first, mask=mask)
        tl.store(target + HALF_DIM, second, mask=mask)
    else:
        slot = tl.load(slots_ptr + token)
        block = (slot // BLOCK_SIZE).to(tl.int64)
        row = layer_offset + slot % BLOCK_SIZE * 2 * HALF_DIM
        if is_value:
            row += value_offset + (head - NUM_HEADS - NUM_KV_HEADS) * head_stride
        else:
            row += (head - NUM_HEADS) * head_stride
        # A token that pads a batch has no place: it writes nothing.
        mask = mask & (slot >= 0)
        cell = cache_ptr + block * block_stride + row + dim
        if LARGEST == 0.0:
            tl.store(cell, first, mask=mask)
            tl.store(cell + HALF_DIM, second, mask=mask)
        else:
            row_scale = scale_of(first.to(tl.float32), second.to(tl.float32), LARGEST)
            tl.store(cell, encode(first.to(tl.float32), row_scale, LARGEST), mask=mask)
            tl.store(cell + HALF_DIM, encode(second.to(tl.float32), row_scale, LARGEST), mask=mask)
            tl.store(scales_ptr + block * scales_stride + row // (2 * HALF_DIM), row_scale, mask=slot >= 0)


def rope_and_write_kv(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
) -> torch.Tensor:
    """See interface.Backend.rope_and_write_kv. Between norm and rotation nothing is rounded."""
    num_tokens = qkv.shape[0]
    with_norm = q_norm_D is not None and k_norm_D is not None
    q_THD = torch.empty(num_tokens, spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device)
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    cache, scales, scales_stride, largest = cache_arguments(kv_cache)
    _norm_rotate_write[(num_tokens, spec.num_heads + 2 * spec.num_kv_heads)](
        qkv,
        q_THD,
        cache,
        scales,
        metadata.positions_T,
        metadata.slots_T,
        spec.cos_MD,
        spec.sin_MD,
        q_norm_D if with_norm else qkv,
        k_norm_D if with_norm else qkv,
        qkv.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        layer * kv_cache.stride(2),
        kv_cache.stride(3),
        scales_stride,
        spec.norm_eps,
        NUM_HEADS=spec.num_heads,
        NUM_KV_HEADS=spec.num_kv_heads,
        BLOCK_SIZE=kv_cache.shape[4],
        HALF_DIM=spec.head_dim // 2,
        PADDED_HALF=padded(spec.head_dim // 2),
        WITH_NORM=with_norm,
        LARGEST=largest,
        num_warps=1,
    )
    return q_THD
