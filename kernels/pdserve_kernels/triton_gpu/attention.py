"""Paged attention: one kernel for decode and for chunks of prefill, straight from the block table.

A tile is some queries of one request, and all heads of them that share one KV head, as the rows of one matrix. It
walks the request's keys in runs of KEYS at fixed absolute positions with the online softmax (Milakov and Gimelshein,
2018; Dao et al., 2022), sums in float32. Low tiles, those of decode, walk in splits of SPLIT keys side by side, since
a GPU has more processors than a decode batch has KV heads; a second kernel joins them. Splits, too, begin at fixed
absolute positions, so that a row's result does not depend on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pdserve_kernels.triton_gpu.codes import cache_arguments, decode
from pdserve_kernels.triton_gpu.launch import ceil_div, dot_dtype, padded

if TYPE_CHECKING:
    from pdserve_kernels.interface import AttentionMetadata, AttentionSpec

_FEW_ROWS = 16
_MANY_ROWS = 64
_KEYS = 64
_SPLIT = 512
_MOST_SPLITS = 64
_NO_WINDOW = 2**30


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one height. int32 on the device.

    Attributes:
        rows: height of the matrix, a power of two.
        used_rows: rows of it that any tile uses.
        request_N, query_N: request of each tile, and its first query among those of the request.
        split: keys of a split.
        num_splits: splits that the keys are walked in side by side; 1 walks them in one go.
    """

    rows: int
    used_rows: int
    request_N: torch.Tensor
    query_N: torch.Tensor
    split: int
    num_splits: int


def make_tiles(query_lens: list[int], seq_lens: list[int], spec: AttentionSpec, kv_cache: torch.Tensor) -> list[Tiles]:
    """Low tiles for requests whose queries fit one, high ones for the others; none of a height that no request needs.

    Where each request has one query, nothing is copied to the device, so that a CUDA graph may do the same again; the
    splits are then as many as the largest of ``seq_lens`` needs, and shorter sequences leave some idle.
    """
    group = spec.num_heads // spec.num_kv_heads
    # As long for every step of a model; longer where a graph would otherwise launch very many that find no keys.
    split = max(_SPLIT, padded(ceil_div(len(spec.cos_MD), _MOST_SPLITS)))
    few = padded(group, _FEW_ROWS)
    # Products of float32 have no tensor cores, and a high tile of them does not fit the registers.
    many = few if kv_cache.dtype == torch.float32 else padded(group, _MANY_ROWS)
    device = kv_cache.device
    if max(query_lens) == 1:
        request_N = torch.arange(len(query_lens), dtype=torch.int32, device=device)
        query_N = torch.zeros_like(request_N)
        return [Tiles(few, group, request_N, query_N, split, ceil_div(max(seq_lens), split))]
    places: dict[bool, list[tuple[int, int]]] = {}
    longest, most_queries = 1, 1
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        is_low = query_len <= few // group
        if is_low:
            longest, most_queries = max(longest, seq_len), max(most_queries, query_len)
        step = (few if is_low else many) // group
        places.setdefault(is_low, []).extend((request, query) for query in range(0, query_len, step))
    tiles = []
    for is_low, pairs in places.items():
        pairs_2N = torch.tensor(pairs, dtype=torch.int32).T.contiguous().to(device)
        rows, used_rows = (few, most_queries * group) if is_low else (many, many // group * group)
        num_splits = ceil_div(longest, split) if is_low else 1
        tiles.append(Tiles(rows, used_rows, pairs_2N[0], pairs_2N[1], split, num_splits))
    return tiles


@triton.jit
def _attend(
    q_ptr,
    cache_ptr,
    scales_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
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
    scales_stride,
    scale_log2,
    window,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    USED_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    IN_SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    LARGEST: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
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
    if IN_SPLITS:
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, (split + 1) * SPLIT)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for run in range(begin, end, KEYS):
        key = run + tl.arange(0, KEYS)
        exists = key < end
        block = tl.load(tables_ptr + request * tables_stride + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        key_row = kv_head * head_stride + layer_offset + key % BLOCK_SIZE * HEAD_DIM
        key_offset = block * block_stride + key_row
        keys_at = cache_ptr + key_offset[None, :] + dim[:, None]
        k = tl.load(keys_at, mask=exists[None, :] & in_dim[:, None], other=0)
        scales_at = scales_ptr + block * scales_stride + key_row // HEAD_DIM
        if LARGEST != 0.0:
            scale = tl.load(scales_at, mask=exists, other=0.0)
            k = (decode(k, LARGEST) * scale[None, :]).to(q_ptr.dtype.element_ty)
        k = k.to(DOT)
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
        v = tl.load(values_at, mask=exists[:, None] & in_dim[None, :], other=0)
        if LARGEST != 0.0:
            scale = tl.load(scales_at + value_offset // HEAD_DIM, mask=exists, other=0.0)
            v = (decode(v, LARGEST) * scale[:, None]).to(q_ptr.dtype.element_ty)
        v = v.to(DOT)
        out = out * correction[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")

    if IN_SPLITS:
        if begin < end:
            part = (tile * tl.num_programs(1) + kv_head) * tl.num_programs(2) + split
            part_row = part.to(tl.int64) * USED_ROWS + row
            tl.store(parts_ptr + part_row[:, None] * HEAD_DIM + dim[None, :], out, mask=row_mask)
            tl.store(sums_ptr + part_row * 2, highest, mask=is_row)
            tl.store(sums_ptr + part_row * 2 + 1, total, mask=is_row)
    else:
        # A row that pads a batch has no key at all.
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + row_offset[:, None] + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=row_mask)


@triton.jit
def _join_splits(
    parts_ptr,
    sums_ptr,
    out_ptr,
    request_ptr,
    query_ptr,
    query_start_ptr,
    seq_lens_ptr,
    window,
    num_splits,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    USED_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The parts of a tile, as if its keys had been walked in one go; the same tiles and rows as in _attend."""
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
    is_row = (row < ROWS // GROUP * GROUP) & (query < query_len)
    row_mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    first_position = seq_len - query_len + first_query
    end = tl.minimum(first_position + ROWS // GROUP, seq_len)
    begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for split in range(begin // SPLIT, tl.cdiv(end, SPLIT)):
        part = (tile * tl.num_programs(1) + kv_head) * num_splits + split
        part_row = part.to(tl.int64) * USED_ROWS + row
        part_highest = tl.load(sums_ptr + part_row * 2, mask=is_row, other=float("-inf"))
        part_total = tl.load(sums_ptr + part_row * 2 + 1, mask=is_row, other=0.0)
        part_out = tl.load(parts_ptr + part_row[:, None] * HEAD_DIM + dim[None, :], mask=row_mask, other=0.0)
        new_highest = tl.maximum(highest, part_highest)
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        correction = tl.exp2(highest - reference)
        weight = tl.exp2(part_highest - reference)
        highest = new_highest
        total = total * correction + part_total * weight
        out = out * correction[:, None] + part_out * weight[:, None]
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    row_offset = ((start + query) * NUM_HEADS + kv_head * GROUP + row % GROUP) * HEAD_DIM
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
    group = num_heads // num_kv_heads
    out_TX = torch.empty(num_tokens, num_heads * head_dim, dtype=q_THD.dtype, device=q_THD.device)
    window = spec.sliding_window or _NO_WINDOW
    cache, scales, scales_stride, largest = cache_arguments(kv_cache)
    for tile in tiles:
        num_tiles = tile.request_N.shape[0]
        shape = {
            "NUM_HEADS": num_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": padded(head_dim, 16),
            "ROWS": tile.rows,
            "USED_ROWS": tile.used_rows,
            "KEYS": _KEYS,
            "SPLIT": tile.split,
        }
        parts = sums = out_TX
        if tile.num_splits > 1:
            num_rows = num_tiles * num_kv_heads * tile.num_splits * tile.used_rows
            parts = torch.empty(num_rows, head_dim, dtype=torch.float32, device=q_THD.device)
            sums = torch.empty(num_rows, 2, dtype=torch.float32, device=q_THD.device)
        _attend[(num_tiles, num_kv_heads, tile.num_splits)](
            q_THD,
            cache,
            scales,
            out_TX,
            parts,
            sums,
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
            scales_stride,
            spec.scale * math.log2(math.e),
            window,
            BLOCK_SIZE=block_size,
            IN_SPLITS=tile.num_splits > 1,
            DOT=dot_dtype(q_THD.dtype),
            LARGEST=largest,
            **shape,
        )
        if tile.num_splits > 1:
            _join_splits[(num_tiles, num_kv_heads)](
                parts,
                sums,
                out_TX,
                tile.request_N,
                tile.query_N,
                metadata.query_start_R1,
                metadata.seq_lens_R,
                window,
                tile.num_splits,
                **shape,
            )
    return out_TX
