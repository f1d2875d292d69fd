"""Backends over a cache of 8-bit codes: what they write is what a plain cache becomes on its way, and what they read is
what it becomes again."""

from __future__ import annotations

import pytest
import torch
from pdserve_kernels import quantized_cache
from pdserve_kernels.errors import NoFlashAttn, NoTriton
from pdserve_kernels.interface import AttentionMetadata, AttentionSpec
from pdserve_kernels.kv_blocks import Conversion, Number, Rows
from pdserve_kernels.quantized_cache import codes_of, is_quantized, scales_of
from pdserve_kernels.select import select_backend
from support.backends import BACKENDS, make_backend

BLOCK, LAYERS, HEADS, KV_HEADS, NUM_BLOCKS = 16, 2, 6, 2, 40
CODES = [torch.int8, torch.float8_e4m3fn]
NUMBERS = {
    torch.bfloat16: Number.BF16,
    torch.float32: Number.F32,
    torch.int8: Number.INT8,
    torch.float8_e4m3fn: Number.FP8,
}
SPANS = [(8, 9), (60, 75), (149, 150), (0, 40)]
FEW_SPANS = [(60, 62), (129, 130)]
"""First position and end of each request's queries: decodes and chunks, within a tile of 64 keys and beyond it."""


def spans_of(name: str) -> list[tuple[int, int]]:
    """Triton's interpreter takes ten milliseconds for each row."""
    return FEW_SPANS if name == "triton" else SPANS


def kinds(*dims: tuple[int, int | None]) -> list[tuple[str, torch.dtype, int, int | None]]:
    """Backends, codes, dimensions and windows; one dimension for Triton's interpreter."""
    return [
        (name, codes, *rest)
        for name in BACKENDS
        for codes in CODES
        for rest in (dims[:1] if name == "triton" else dims)
    ]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def empty_cache(dtype: torch.dtype, dim: int) -> torch.Tensor:
    """Of NaN, or of codes and scales that mean nothing."""
    shape = (KV_HEADS, LAYERS, 2, BLOCK, dim)
    if dtype not in CODES:
        return torch.full((NUM_BLOCKS, *shape), float("nan"), dtype=dtype)
    rows = KV_HEADS * LAYERS * 2 * BLOCK
    return codes_of(torch.full((NUM_BLOCKS, rows * dim + 4 * rows), 255, dtype=torch.uint8), dtype, shape)


def blocks_of(cache: torch.Tensor) -> torch.Tensor:
    """The bytes of all blocks, uint8 [B, block_bytes]."""
    size = cache.stride(0) * cache.itemsize
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage(), 0, (NUM_BLOCKS, size), (size, 1))


def convert(source: torch.Tensor, target: torch.Tensor) -> None:
    """As blocks are converted when they are sent or land."""
    dim = source.shape[-1]
    strides = (LAYERS * 2 * BLOCK, 2 * BLOCK, BLOCK, 1)
    num_rows = KV_HEADS * LAYERS * 2 * BLOCK

    def rows(cache: torch.Tensor) -> Rows:
        return Rows(NUMBERS[cache.dtype], dim, strides, num_rows * dim if is_quantized(cache) else None)

    conversion = Conversion(rows(source), rows(target), (KV_HEADS, LAYERS, 2))
    for from_B, to_B in zip(blocks_of(source).numpy(), blocks_of(target).numpy(), strict=True):
        conversion.run(from_B, to_B, 0, 0, BLOCK)


def step(spans: list[tuple[int, int]]) -> AttentionMetadata:
    """No two requests have a block in common: two tokens of one slot would be written in any order."""
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
    tables = [order[10 * index :][: -(-end // BLOCK)] for index, (_, end) in enumerate(spans)]
    width = max(len(table) for table in tables)
    where = [(table, p) for table, (start, end) in zip(tables, spans, strict=True) for p in range(start, end)]
    lens = [end - start for start, end in spans]
    as_int = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    return AttentionMetadata(
        positions_T=as_int([p for _, p in where]),
        slots_T=as_int([table[p // BLOCK] * BLOCK + p % BLOCK for table, p in where]),
        query_start_R1=as_int([sum(lens[:i]) for i in range(len(lens) + 1)]),
        seq_lens_R=as_int([end for _, end in spans]),
        block_tables_RP=as_int([table + [0] * (width - len(table)) for table in tables]),
        query_lens=lens,
        seq_lens=[end for _, end in spans],
    )


def one_of(metadata: AttentionMetadata, index: int) -> AttentionMetadata:
    """A request of a step by itself."""
    start, end = metadata.query_start_R1[index : index + 2].tolist()
    return AttentionMetadata(
        positions_T=metadata.positions_T[start:end],
        slots_T=metadata.slots_T[start:end],
        query_start_R1=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens_R=metadata.seq_lens_R[index : index + 1],
        block_tables_RP=metadata.block_tables_RP[index : index + 1],
        query_lens=[end - start],
        seq_lens=metadata.seq_lens[index : index + 1],
    )


def spec(dim: int, window: int | None = None) -> AttentionSpec:
    angles = torch.arange(160.0).unsqueeze(1) * torch.logspace(0, -3, dim // 2)
    return AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        scale=dim**-0.5,
        sliding_window=window,
        cos_MD=angles.cos(),
        sin_MD=angles.sin(),
        norm_eps=1e-6,
    )


@pytest.mark.parametrize(("name", "codes", "dim", "window"), kinds((20, None), (64, None)), ids=str)
def test_what_is_written_is_what_a_plain_cache_becomes(name, codes, dim, window):
    backend, metadata = make_backend(name), step(spans_of(name))
    tokens = len(metadata.positions_T)
    qkv = (random(tokens, (HEADS + 2 * KV_HEADS) * dim) * torch.logspace(-3, 2, tokens).unsqueeze(1)).bfloat16()
    qkv[1] = 0
    plain, ours, expected = empty_cache(torch.bfloat16, dim), empty_cache(codes, dim), empty_cache(codes, dim)
    norm = random(dim, seed=1).bfloat16()
    queries = [
        backend.rope_and_write_kv(qkv, 1, backend.plan(metadata, spec(dim, window), cache), norm, norm)
        for cache in (plain, ours)
    ]
    assert torch.equal(*queries)
    convert(plain, expected)
    slots = metadata.slots_T.long()
    for found, wanted in ((ours.view(torch.uint8), expected.view(torch.uint8)), (scales_of(ours), scales_of(expected))):
        written, other = (x[slots // BLOCK, :, 1, :, slots % BLOCK] for x in (found, wanted))
        assert torch.equal(written, other)
    untouched = blocks_of(ours) == 255
    rows = int((~untouched[:, : ours[0].numel()].unflatten(1, (-1, dim))).any(2).sum())
    assert rows <= tokens * KV_HEADS * 2, "other rows are written"


@pytest.mark.parametrize(("name", "codes", "dim", "window"), kinds((20, 50), (64, None)), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_is_that_over_the_numbers_that_the_codes_mean(name, codes, dim, window, dtype):
    backend, metadata = make_backend(name), step(spans_of(name))
    plain, coded, back = (empty_cache(d, dim) for d in (dtype, codes, dtype))
    plain.copy_(random(*plain.shape))
    convert(plain, coded)
    convert(coded, back)
    q_THD = random(len(metadata.positions_T), HEADS, dim, seed=1).to(dtype)
    ours, expected = (
        backend.paged_attention(q_THD, 1, backend.plan(metadata, spec(dim, window), cache)) for cache in (coded, back)
    )
    # Triton's interpreter cuts numbers to bfloat16 where a GPU rounds them.
    tolerance = 3e-2 if name == "triton" and dtype == torch.bfloat16 else 0
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    assert not torch.equal(ours, backend.paged_attention(q_THD, 1, backend.plan(metadata, spec(dim, window), plain)))
    token = 0
    for index, (start, end) in enumerate(spans_of(name)):
        count = end - start
        alone = backend.plan(one_of(metadata, index), spec(dim, window), coded)
        assert torch.equal(backend.paged_attention(q_THD[token : token + count], 1, alone), ours[token : token + count])
        token += count


def test_scales_begin_at_a_multiple_of_four_bytes():
    blocks = torch.zeros(2, 12 + 4 * 3, dtype=torch.uint8)
    codes = codes_of(blocks, torch.int8, (1, 3, 1, 1, 3))
    scales_of(codes)[1, 0, 2] = 1.0
    assert blocks.nonzero().tolist() == [[1, 22], [1, 23]]


def test_who_cannot_read_codes_says_so():
    with pytest.raises(NoFlashAttn, match="int8 or fp8"):
        select_backend("flash_attn", dtype=torch.bfloat16, quantized_cache=True)
    with pytest.raises(NoTriton, match="float32"):
        select_backend("triton", dtype=torch.float32, quantized_cache=True)
    assert set(quantized_cache.LARGEST_CODE) == set(CODES)
