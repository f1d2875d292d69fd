"""Digest, copy and conversion of KV blocks: the C kernels against xxhash, numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings, strategies as st
from pdserve_kernels import kv_blocks, kv_blocks_reference as reference
from pdserve_kernels.cpu import is_built
from pdserve_kernels.kv_blocks import Conversion, Number, Rows, copy_digest, digest

HEADS, LAYERS, TOKENS, DIM = 3, 4, 8, 48
EXTENTS = (HEADS, LAYERS, 2)
HEAD_MAJOR = (LAYERS * 2 * TOKENS, 2 * TOKENS, TOKENS, 1)
TOKEN_MAJOR = (1, 2 * TOKENS * HEADS, TOKENS * HEADS, HEADS)
ROWS = HEADS * LAYERS * 2 * TOKENS


def rows(number: Number, strides: tuple[int, int, int, int] = HEAD_MAJOR) -> Rows:
    return Rows(number, DIM, strides, ROWS * DIM * number.size if number.scaled else None)


def block_of(layout: Rows, seed: int | None = None) -> np.ndarray:
    size = ROWS * DIM * layout.number.size + (4 * ROWS if layout.number.scaled else 0)
    if seed is None:
        return np.zeros(size, dtype=np.uint8)
    values = np.random.default_rng(seed).standard_normal(ROWS * DIM).astype(np.float32) * 3
    values[:DIM] = 0
    if layout.number == Number.BF16:
        return reference.to_bf16(values).view(np.uint8)
    assert layout.number == Number.F32
    return values.view(np.uint8)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 5000), seed=st.integers(0, 99))
def test_the_digest_is_xxh3_128(size: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    copy = np.zeros_like(data)
    expected = xxhash.xxh3_128_digest(data.tobytes())
    assert digest(data) == copy_digest(data, copy) == expected
    assert np.array_equal(copy, data)


@pytest.mark.parametrize("size", [240, 241, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 368640])
def test_the_digest_at_the_seams(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert digest(data) == xxhash.xxh3_128_digest(data.tobytes())


@pytest.mark.parametrize("target_strides", [HEAD_MAJOR, TOKEN_MAJOR])
@pytest.mark.parametrize(
    ("source_number", "target_number"),
    [
        (Number.BF16, Number.BF16),
        (Number.F32, Number.F32),
        (Number.F32, Number.BF16),
        (Number.BF16, Number.F32),
        (Number.BF16, Number.INT8),
        (Number.F32, Number.FP8),
        (Number.BF16, Number.FP8),
    ],
)
@pytest.mark.parametrize("run", [(0, 0, TOKENS), (2, 5, 3), (7, 0, 1)])
def test_c_converts_as_numpy_does(
    source_number: Number,
    target_number: Number,
    target_strides: tuple[int, int, int, int],
    run: tuple[int, int, int],
) -> None:
    if not is_built():
        pytest.skip("the C kernels are not installed")
    source, target = rows(source_number), rows(target_number, target_strides)
    block = block_of(source, seed=5)
    ours, theirs = block_of(target), block_of(target)
    first, to, count = run
    Conversion(source, target, EXTENTS).run(block, ours, first, to, count)
    reference.convert(source, target, (*EXTENTS, count), block, theirs, first, to)
    assert np.array_equal(ours, theirs)
    back, expected = block_of(source), block_of(source)
    Conversion(target, source, EXTENTS).run(ours, back, to, first, count)
    reference.convert(target, source, (*EXTENTS, count), theirs, expected, to, first)
    assert np.array_equal(back, expected)
    if not target_number.scaled and (source_number, target_number) != (Number.F32, Number.BF16):
        where = np.arange(first, first + count)
        shape = (HEADS, LAYERS, 2, TOKENS, DIM * source_number.size)
        assert np.array_equal(back.reshape(shape)[:, :, :, where], block.reshape(shape)[:, :, :, where])


@pytest.mark.parametrize("number", [Number.INT8, Number.FP8])
@pytest.mark.parametrize("run", [(0, 0, TOKENS), (2, 5, 3)])
def test_codes_are_copied_with_their_scales(
    number: Number, run: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = rows(number), rows(number, TOKEN_MAJOR)
    block = np.random.default_rng(3).integers(0, 256, ROWS * (DIM + 4), dtype=np.uint8)
    first, to, count = run
    results = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr(kv_blocks, "_native", None)
        there, back = np.zeros_like(block), np.zeros_like(block)
        Conversion(source, target, EXTENTS).run(block, there, first, to, count)
        Conversion(target, source, EXTENTS).run(there, back, to, first, count)
        for data, width in ((block[: ROWS * DIM], DIM), (block[ROWS * DIM :], 4)):
            where = slice(0, ROWS * DIM) if width == DIM else slice(ROWS * DIM, None)
            shape = (HEADS, LAYERS, 2, TOKENS, width)
            found = back[where].reshape(shape)
            assert np.array_equal(
                found[..., first : first + count, :], data.reshape(shape)[..., first : first + count, :]
            )
        results.append(there)
    assert np.array_equal(*results)


@pytest.mark.parametrize(("number", "error"), [(Number.INT8, 1 / 253), (Number.FP8, 1 / 16)])
def test_quantized_rows_are_close(number: Number, error: float) -> None:
    source, target = rows(Number.F32), rows(number)
    block, coded, back = block_of(source, seed=1), block_of(target), block_of(source)
    Conversion(source, target, EXTENTS).run(block, coded, 0, 0, TOKENS)
    Conversion(target, source, EXTENTS).run(coded, back, 0, 0, TOKENS)
    before, after = block.view(np.float32).reshape(-1, DIM), back.view(np.float32).reshape(-1, DIM)
    limits = np.abs(before).max(axis=1, keepdims=True) * error
    if number is Number.FP8:
        limits = np.abs(before) * error + limits / 64
    assert (np.abs(after - before) <= limits + 1e-12).all()
    assert not after[0].any()


def test_numbers_are_those_of_torch() -> None:
    values = np.random.default_rng(3).standard_normal(4096).astype(np.float32) * 100
    values[:4] = [np.inf, -np.inf, np.nan, -0.0]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    ours = reference.to_bf16(values)
    assert ours[2] & 0x7FFF > 0x7F80
    ours[2] = expected[2]
    assert np.array_equal(ours, expected)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    known = np.ones(256, dtype=bool)
    known[[0x7F, 0xFF]] = False
    assert np.array_equal(reference.E4M3_VALUES[known], codes[known])
    bounded = np.clip(np.append(values[4:], np.linspace(-0.02, 0.02, 4097, dtype=np.float32)), -448, 448)
    expected = torch.from_numpy(bounded).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(reference.to_e4m3(bounded), expected)


def test_without_the_extension_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = rows(Number.BF16), rows(Number.INT8, TOKEN_MAJOR)
    block, ours = block_of(source, seed=2), block_of(target)
    Conversion(source, target, EXTENTS).run(block, ours, 0, 0, TOKENS)
    data, copy = block.copy(), np.zeros_like(block)
    expected = digest(data)
    monkeypatch.setattr(kv_blocks, "_native", None)
    theirs = block_of(target)
    Conversion(source, target, EXTENTS).run(block, theirs, 0, 0, TOKENS)
    assert np.array_equal(ours, theirs)
    assert digest(data) == copy_digest(data, copy) == expected
    assert np.array_equal(copy, data)


def test_rows_that_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of"):
        Conversion(Rows(Number.F32, 2048, (1, 1, 1, 1)), Rows(Number.F32, 2048, (1, 1, 1, 1)), (1, 1, 2))
