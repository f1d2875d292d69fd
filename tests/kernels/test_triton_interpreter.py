"""What only the Triton kernels have, in Triton's interpreter; test_backends.py holds for them as for every backend."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve_engine.worker import Worker
from pdserve_kernels import triton_gpu
from pdserve_kernels.errors import NoTriton
from pdserve_kernels.interface import AttentionMetadata, AttentionSpec
from pdserve_kernels.select import select_backend
from pdserve_kernels.torch_backend import TorchBackend
from support.driver import Driver
from support.models import tiny_mistral, tiny_qwen3

pytest.importorskip("triton")

from pdserve_kernels.triton_gpu import attention
from pdserve_kernels.triton_gpu.activation import silu_mul
from pdserve_kernels.triton_gpu.attention import paged_attention
from pdserve_kernels.triton_gpu.backend import TritonBackend
from pdserve_kernels.triton_gpu.check import QWEN3_8B, cases
from pdserve_kernels.triton_gpu.landing import land
from pdserve_kernels.triton_gpu.launch import is_interpreted
from pdserve_kernels.triton_gpu.norm import rms_norm

TESTS = Path(__file__).parent.parent


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_interpreter_runs():
    assert is_interpreted()
    assert "interpreter" in select_backend("triton").fingerprint(torch.bfloat16)


def test_without_triton_the_name_says_so(monkeypatch):
    monkeypatch.setattr(triton_gpu, "is_installed", lambda: False)
    with pytest.raises(NoTriton, match="not installed"):
        select_backend("triton")


def spec_of(heads: int, kv_heads: int, dim: int, window: int | None = None) -> AttentionSpec:
    table_MD = torch.ones(512, dim // 2)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        sliding_window=window,
        cos_MD=table_MD,
        sin_MD=table_MD,
        norm_eps=1e-6,
    )


def metadata_of(query_lens: list[int], seq_lens: list[int], block: int) -> AttentionMetadata:
    """Requests whose blocks lie all over a cache of just their size."""
    num_blocks = [-(-n // block) for n in seq_lens]
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(5)).int().split(num_blocks)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return AttentionMetadata(
        positions_T=torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)]).int(),
        slots_T=torch.zeros(sum(query_lens), dtype=torch.int32),
        query_start_R1=starts,
        seq_lens_R=ints(*seq_lens),
        block_tables_RP=torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True),
        query_lens=query_lens,
        seq_lens=seq_lens,
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_over_several_runs_of_keys(dtype, tolerance, window):
    """Chunks higher than a tile and sequences longer than a run of keys, from blocks out of order, as torch has it."""
    metadata = metadata_of([1, 30, 75], [150, 140, 75], 8)
    spec = spec_of(6, 2, 24, window)
    cache = random(48, 2, 2, 2, 8, 24, dtype=dtype)
    q_THD = random(106, 6, 24, seed=1, dtype=dtype)
    outs = []
    for backend in (TritonBackend(), TorchBackend()):
        outs.append(backend.paged_attention(q_THD, 1, backend.plan(metadata, spec, cache)))
    torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([1, 1, 1], [150, 64, 65]), ([1, 3, 40], [200, 130, 90])], ids=["decode", "mixed"]
)
def test_attention_in_splits(monkeypatch, query_lens, seq_lens, window):
    """Splits side by side are the walk in one go; one of a single part changes no bit of it."""
    metadata = metadata_of(query_lens, seq_lens, 8)
    spec = spec_of(6, 2, 24, window)
    cache = random(int(metadata.block_tables_RP.max()) + 1, 2, 2, 2, 8, 24)
    q_THD = random(sum(query_lens), 6, 24, seed=1)
    expected = TorchBackend().paged_attention(q_THD, 1, TorchBackend().plan(metadata, spec, cache))
    in_one_go = paged_attention(q_THD, cache, 1, metadata, spec, TritonBackend().plan(metadata, spec, cache).tiles)
    monkeypatch.setattr(attention, "_SPLIT", 64)
    plan = TritonBackend().plan(metadata, spec, cache)
    assert max(tiles.num_splits for tiles in plan.tiles) > 2
    in_splits = TritonBackend().paged_attention(q_THD, 1, plan)
    torch.testing.assert_close(in_splits, expected, rtol=1e-5, atol=1e-5)
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len == 1 and seq_len <= 64:
            assert torch.equal(in_splits[index], in_one_go[index])


def test_a_row_that_pads_a_batch_touches_nothing():
    """Length 0 and slot -1: zeros come out of attention, and the cache stays as it is."""
    metadata = metadata_of([1, 1], [20, 8], 8)
    padded = replace(metadata, seq_lens_R=ints(20, 0), slots_T=ints(9, -1))
    spec = spec_of(4, 2, 8)
    cache = random(4, 2, 2, 2, 8, 8)
    before = cache.clone()
    backend = TritonBackend()
    plan = backend.plan(padded, spec, cache)
    q_THD = backend.rope_and_write_kv(random(2, 8 * 8), 1, plan)
    changed = (cache != before).flatten(3).any(3).nonzero()[:, [0, 2]].unique(dim=0)
    assert changed.tolist() == [[1, 1]]
    out_TX = backend.paged_attention(q_THD, 1, plan)
    assert out_TX[0].abs().min() > 0
    assert not out_TX[1].any()


def test_norm_and_activation_of_rows_that_lie_apart():
    wide, weight = random(4, 40), random(24, seed=1)
    reference = TorchBackend()
    torch.testing.assert_close(
        rms_norm(wide[:, :24], weight, 1e-5)[0], reference.rms_norm(wide[:, :24], weight, 1e-5)[0]
    )
    wider = random(3, 2100)
    torch.testing.assert_close(silu_mul(wider[:, :2060]), reference.silu_mul(wider[:, :2060].clone()))


def test_landed_blocks_are_copied_bit_for_bit():
    landed = random(5, 2, 3, 2, 4, 8, dtype=torch.bfloat16)
    cache = random(7, 2, 3, 2, 4, 8, seed=1, dtype=torch.bfloat16)
    expected = cache.clone()
    expected[[6, 0, 3]] = landed[[4, 1, 2]]
    land(landed, ints(4, 1, 2), cache, ints(6, 0, 3), num_tokens=12)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("landed_size", [2, 3, 16])
def test_landed_blocks_of_another_size_order_and_dtype(landed_size):
    """Tokens first in their region, float32, to bfloat16 blocks of 4 with heads first; 10 tokens from the third on."""
    kv_heads, layers, size, dim, num_tokens, first = 2, 3, 4, 6, 10, 3
    num_slots = -(-num_tokens // landed_size)
    region = random(num_slots + 2, landed_size, layers, 2, kv_heads, dim).bfloat16().float()
    slots = list(range(1, num_slots + 1))[::-1]
    blocks = [8, 2, 5, 0]
    cache = torch.full((9, kv_heads, layers, 2, size, dim), -7.0, dtype=torch.bfloat16)
    expected = cache.clone()
    for token in range(num_tokens):
        source = region[slots[token // landed_size], token % landed_size]
        place = first + token
        expected[blocks[place // size], :, :, :, place % size] = source.permute(2, 0, 1, 3).bfloat16()
    land(region.permute(0, 4, 2, 3, 1, 5), ints(*slots), cache, ints(*blocks), num_tokens=num_tokens, first_token=first)
    assert torch.equal(cache, expected)


@pytest.mark.slow
@pytest.mark.parametrize("write", [tiny_qwen3, lambda folder: tiny_mistral(folder, sliding_window=20)])
def test_whole_model(tmp_path, write):
    """Chunked prefill beside decode: the tokens of the torch backend, and its KV."""
    folder = write(tmp_path / "model")
    config = EngineConfig(
        model=ModelConfig(path=folder, dtype="float32"),
        cache=CacheConfig(block_size=16, num_blocks=16),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128),
        num_threads=1,
    )
    results = []
    for backend in ("triton", "torch"):
        worker = Worker(config, backend=backend)
        driver = Driver(worker)
        sequences = [driver.add(list(range(3, 29)), chunks=[15]), driver.add([7, 8, 9])]
        outputs = driver.run(*sequences, num_tokens=2)
        results.append((outputs, worker.kv_cache.clone()))
    (tokens, cache), (expected_tokens, expected_cache) = results
    assert tokens == expected_tokens
    torch.testing.assert_close(cache, expected_cache, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_every_case_of_the_check_holds():
    """At a tiny size, without times: the check is right where it calls a kernel right."""
    steps = {"decode of 2": [(1, 9), (1, 20)], "prefill": [(7, 12), (1, 3)]}
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "hidden_size": 16, "inner_size": 24, "vocab_size": 40}
    tiny = replace(QWEN3_8B, **sizes, block_size=4, sliding_window=5, landed_blocks=5, steps=steps)
    names = []
    for case in cases(tiny, torch.device("cpu")):
        assert case.error() <= 1, case.name
        names.append(case.name)
        wrong = replace(case, expected=tuple(expected + 1 for expected in case.expected))
        assert wrong.error() > 1
    assert len(names) == len(set(names)) == 16


@pytest.mark.slow
def test_all_kernels_compile_for_a_gpu(tmp_path):
    """To machine code of compute capability 9.0; nothing runs it here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "support.compile_triton", "90"]

    def compiled(dtype):
        done = subprocess.run([*command, dtype], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    with ThreadPoolExecutor() as threads:
        results = list(threads.map(compiled, ["bfloat16", "float32"]))
    attention_kernels = {"_attend", "_join_splits", "_norm_rotate_write"}
    names = attention_kernels | {"_add_and_norm", "_silu_mul", "_land", "_copy_and_digest"}
    for sizes in results:
        assert {name for name, _ in sizes} == names
        assert all(int(size) > 0 for _, size in sizes)
