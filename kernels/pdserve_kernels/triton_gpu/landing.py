"""The copy of the landing pass: landed blocks into blocks of the cache, with another size, order or dtype if need be.

Digests are not computed here; who copies has checked them.

Letters beside those of the interface: N slots of the landing region, W tokens of a landed block, C slots that are
copied, K blocks that they go to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pdserve_kernels.triton_gpu.launch import ceil_div, padded

if TYPE_CHECKING:
    import torch

_TOKENS = 32


@triton.jit
def _land(
    landed_ptr,
    cache_ptr,
    slots_ptr,
    blocks_ptr,
    num_tokens,
    first_token,
    slot_stride,
    landed_head_stride,
    landed_layer_stride,
    landed_value_stride,
    landed_token_stride,
    landed_dim_stride,
    block_stride,
    head_stride,
    layer_stride,
    value_stride,
    NUM_HEADS: tl.constexpr,
    LANDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    run = tl.program_id(0)
    plane = tl.program_id(1)
    is_value = plane % 2
    head = plane // 2 % NUM_HEADS
    layer = plane // 2 // NUM_HEADS
    token = run * TOKENS + tl.arange(0, TOKENS)
    dim = tl.arange(0, PADDED_DIM)
    exists = token < num_tokens
    mask = exists[:, None] & (dim < HEAD_DIM)[None, :]

    slot = tl.load(slots_ptr + token // LANDED_SIZE, mask=exists, other=0).to(tl.int64)
    source = slot * slot_stride + token % LANDED_SIZE * landed_token_stride
    source += head * landed_head_stride + layer * landed_layer_stride + is_value * landed_value_stride
    x = tl.load(landed_ptr + source[:, None] + dim[None, :] * landed_dim_stride, mask=mask, other=0.0)

    place = first_token + token
    block = tl.load(blocks_ptr + place // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    target = block * block_stride + place % BLOCK_SIZE * HEAD_DIM
    target += head * head_stride + layer * layer_stride + is_value * value_stride
    tl.store(cache_ptr + target[:, None] + dim[None, :], x.to(cache_ptr.dtype.element_ty), mask=mask)


def land(
    landed: torch.Tensor,
    slots_C: torch.Tensor,
    kv_cache: torch.Tensor,
    blocks_K: torch.Tensor,
    *,
    num_tokens: int,
    first_token: int = 0,
) -> None:
    """Copies tokens from slots of a landing region to blocks of the cache.

    Args:
        landed: [N, G, L, 2, W, D] of any strides: a region in another order is a view of it.
        slots_C: where the tokens lie, in their order; int32. C * W >= num_tokens.
        kv_cache: [B, G, L, 2, S, D], contiguous.
        blocks_K: where they go; int32. K * S >= first_token + num_tokens.
        first_token: place of the first token in the run of ``blocks_K``; other places keep what they hold.
    """
    _, num_heads, num_layers, _, block_size, head_dim = kv_cache.shape
    _land[(ceil_div(num_tokens, _TOKENS), num_layers * num_heads * 2)](
        landed,
        kv_cache,
        slots_C,
        blocks_K,
        num_tokens,
        first_token,
        *landed.stride(),
        *kv_cache.stride()[:4],
        NUM_HEADS=num_heads,
        LANDED_SIZE=landed.shape[4],
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim),
        TOKENS=_TOKENS,
    )
