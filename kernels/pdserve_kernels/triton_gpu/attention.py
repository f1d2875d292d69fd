"""Paged attention: one kernel for decode and for chunks of prefill, straight from the block table.

A tile is some queries of one request, and all heads of them that share one KV head, as the rows of one matrix. It
walks the request's keys in runs of KEYS at fixed absolute positions with the online softmax (Milakov and Gimelshein,
2018; Dao et al., 2022), sums in float32. A request at decode is one walk for each KV head, however long it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pdserve_kernels.triton_gpu.launch import dot_dtype, padded

if TYPE_CHECKING:
    from pdserve_kernels.interface import AttentionMetadata, AttentionSpec

_FEW_ROWS = 16
_MANY_ROWS = 64
_KEYS = 64
_NO_WINDOW = 2**30


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one height. int32 on the device.

    Attributes:
        rows: height of the matrix, a power of two.
        request_N, query_N: request of each tile, and its first query among those of the request.
    """

    rows: int
    request_N: torch.Tensor
    query_N: torch.Tensor


def make_tiles(query_lens: list[int], group: int, kv_cache: torch.Tensor) -> list[Tiles]:
    """Low tiles for requests whose queries fit one, high ones for the others; none of a height that no request needs.

    ``group``: query heads of a KV head.
    """
    few = padded(group, _FEW_ROWS)
    # Products of float32 have no tensor cores, and a high tile of them does not fit the registers.
    many = few if kv_cache.dtype == torch.float32 else padded(group, _MANY_ROWS)
    places: dict[int, list[tuple[int, int]]] = {}
    for request, query_len in enumerate(query_lens):
        rows = few if query_len <= few // group else many
        places.setdefault(rows, []).extend((request, query) for query in range(0, query_len, rows // group))
    tiles = []
    for rows, pairs in places.items():
        requests_and_queries = torch.tensor(pairs, dtype=torch.int32).T.contiguous().to(kv_cache.device)
        tiles.append(Tiles(rows, requests_and_queries[0], requests_and_queries[1]))
    return tiles


@triton.jit
def _attend(
    q_ptr,
    cache_ptr,
    out_ptr,
    tables_ptr,
    request_ptr,
    query_ptr,
    query_start_ptr,
    seq_lens_ptr,
    tables_stride,
    block_stride,
    head_stride,
    layer_offset,
    value_offset,
    scale_log2,
    window,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.load(request_ptr + tile)
    first_query = tl.load(query_ptr + tile)
    start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - start
    seq_len = tl.load(seq_lens_ptr + request)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    query = first_query + row // GROUP
    in_dim = dim < HEAD_DIM
    is_row = (row < ROWS // GROUP * GROUP) & (query < query_len)
    row_offset = ((start + query) * NUM_HEADS + kv_head * GROUP + row % GROUP) * HEAD_DIM
    row_mask = is_row[:, None] & in_dim[None, :]
    q = tl.load(q_ptr + row_offset[:, None] + dim[None, :], mask=row_mask, other=0.0).to(DOT)

    first_position = seq_len - query_len + first_query
    position = first_position + row // GROUP
    end = tl.minimum(first_position + ROWS // GROUP, seq_len)
    begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for run in range(begin, end, KEYS):
        key = run + tl.arange(0, KEYS)
        exists = key < end
        block = tl.load(tables_ptr + request * tables_stride + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        key_offset = block * block_stride + kv_head * head_stride + layer_offset + key % BLOCK_SIZE * HEAD_DIM
        keys_at = cache_ptr + key_offset[None, :] + dim[:, None]
        k = tl.load(keys_at, mask=exists[None, :] & in_dim[:, None], other=0.0).to(DOT)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        visible = exists[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))

        # A row that has seen no key yet has no highest score: with 0 in its place all its weights are 0, not NaN.
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - reference[:, None])
        correction = tl.exp2(highest - reference)
        highest = new_highest
        total = total * correction + tl.sum(weights, 1)

        values_at = cache_ptr + value_offset + key_offset[:, None] + dim[None, :]
        v = tl.load(values_at, mask=exists[:, None] & in_dim[None, :], other=0.0).to(DOT)
        out = out * correction[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")

    out = out / tl.where(is_row, total, 1.0)[:, None]
    tl.store(out_ptr + row_offset[:, None] + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=row_mask)


def paged_attention(
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    tiles: list[Tiles],
) -> torch.Tensor:
    """Each query attends to the cached tokens of its request up to itself. Returns [T, H * D]."""
    q_THD = q_THD.contiguous()
    num_tokens, num_heads, head_dim = q_THD.shape
    _, num_kv_heads, _, _, block_size, _ = kv_cache.shape
    out_TX = torch.empty(num_tokens, num_heads * head_dim, dtype=q_THD.dtype, device=q_THD.device)
    for tile in tiles:
        _attend[(tile.request_N.shape[0], num_kv_heads)](
            q_THD,
            kv_cache,
            out_TX,
            metadata.block_tables_RP,
            tile.request_N,
            tile.query_N,
            metadata.query_start_R1,
            metadata.seq_lens_R,
            metadata.block_tables_RP.stride(0),
            kv_cache.stride(0),
            kv_cache.stride(1),
            layer * kv_cache.stride(2),
            kv_cache.stride(3),
            spec.scale * math.log2(math.e),
            spec.sliding_window or _NO_WINDOW,
            NUM_HEADS=num_heads,
            GROUP=num_heads // num_kv_heads,
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded(head_dim, 16),
            ROWS=tile.rows,
            KEYS=_KEYS,
            DOT=dot_dtype(kv_cache.dtype),
        )
    return out_TX
