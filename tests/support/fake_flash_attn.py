"""A stand-in for the flash_attn package: the two functions that are used, with their documented signatures (2.7) and
what they demand of their arguments, computed plainly in float32 on any device.
"""

from __future__ import annotations

from itertools import pairwise

import torch

__version__ = "2.7.0"

calls: list[str] = []
"""Names of the functions in the order of their calls."""

memory = 0
"""Address of the storage that the keys of the last call lie in."""


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    calls.append("with_kvcache")
    batch, seqlen, heads, dim = q.shape
    _check_cache(q, k_cache, v_cache, block_table, batch)
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.shape == (batch,)
    out = torch.empty(batch, seqlen, heads, dim, dtype=q.dtype, device=q.device)
    for index, length in enumerate(cache_seqlens.tolist()):
        out[index] = _attend(
            q[index], *_gather(k_cache, v_cache, block_table[index], length), softmax_scale, causal, window_size
        )
    return out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    calls.append("varlen")
    starts, kv_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    _check_cache(q, k, v, block_table, len(starts) - 1)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_k.is_contiguous()
    assert starts[0] == kv_starts[0] == 0
    assert starts[-1] == q.shape[0]
    lens = [b - a for a, b in pairwise(starts)]
    kv_lens = [b - a for a, b in pairwise(kv_starts)]
    assert isinstance(max_seqlen_q, int)
    assert isinstance(max_seqlen_k, int)
    assert (max_seqlen_q, max_seqlen_k) == (max(lens), max(kv_lens))
    parts = [
        _attend(q[start : start + n], *_gather(k, v, table, kv_len), softmax_scale, causal, window_size)
        for start, n, kv_len, table in zip(starts, lens, kv_lens, block_table, strict=False)
    ]
    return torch.cat(parts)


def _check_cache(q, k, v, block_table, batch):
    global memory
    memory = k.untyped_storage().data_ptr()
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape[1] % 256 == 0, "page_block_size must be a multiple of 256"
    assert q.shape[-2] % k.shape[2] == 0
    assert q.shape[-1] == k.shape[3]
    assert block_table.dtype == torch.int32
    assert block_table.shape[0] == batch
    assert block_table.stride(-1) == 1


def _gather(k, v, table, length):
    pages = table[: -(-length // k.shape[1])].long()
    return (cache[pages].flatten(0, 1)[:length] for cache in (k, v))


def _attend(q, k, v, scale, causal, window):
    """q [n, H, D] at the end of k and v [m, G, D]; a row that sees nothing is zero."""
    n, heads, dim = q.shape
    if not len(k):
        return torch.zeros_like(q)
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * (dim**-0.5 if scale is None else scale)
    key = torch.arange(len(k)).unsqueeze(0)
    query = torch.arange(len(k) - n, len(k)).unsqueeze(1)
    left, right = window
    hidden = (key > query) if causal else torch.zeros_like(key > query)
    if left >= 0:
        hidden |= key < query - left
    if right >= 0:
        hidden |= key > query + right
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).to(q.dtype)
