"""A KV cache of 8-bit codes in the engine: what it changes and what it does not."""

from __future__ import annotations

import pytest
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig
from pdserve_engine.errors import NoKernels
from pdserve_engine.llm import LLM
from pdserve_engine.worker import Worker
from pdserve_kernels import cpu
from pdserve_protocol.sampling import SamplingParams
from support.models import tiny_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def worker(folder, kv_cache_dtype, backend="auto", **cache):
    return Worker(
        EngineConfig(model=ModelConfig(path=folder), cache=CacheConfig(dtype=kv_cache_dtype, **cache), num_threads=1),
        backend=backend,
    )


def test_what_a_worker_makes_of_it(tmp_path):
    folder = tiny_model(tmp_path / "tiny")
    plain, int8, fp8 = (worker(folder, dtype, memory_bytes=1 << 20) for dtype in ("auto", "int8", "fp8"))
    assert [w.layout.dtype for w in (plain, int8, fp8)] == ["bfloat16", "int8", "fp8"]
    assert [w.layout.fault() for w in (plain, int8, fp8)] == [None] * 3
    # A row of 16 numbers: 32 bytes, or 16 and a scale.
    assert int8.num_blocks == fp8.num_blocks == (1 << 20) // int8.layout.block_bytes
    assert int8.num_blocks / plain.num_blocks == pytest.approx(32 / 20, rel=0.02)
    assert [w.numerics.removeprefix(plain.numerics) for w in (plain, int8, fp8)] == ["", "/kv-int8", "/kv-fp8"]
    int8.kv_bytes()[3] = 1
    assert (int8.kv_cache[3] == 1).all()
    assert not int8.kv_cache[2].any()


def test_flash_attn_refuses_it_by_name(tmp_path):
    with pytest.raises(NoKernels, match=r"flash_attn .*int8 or fp8"):
        worker(tiny_model(tmp_path / "tiny"), "int8", backend="flash_attn", num_blocks=2)


@pytest.mark.skipif(not cpu.is_built(), reason="rows of torch depend on the batch")
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_chunks_cache_hits_preemption_and_neighbours_do_not_change_the_answer(tmp_path, dtype):
    folder = str(tiny_model(tmp_path / "tiny"))
    prompts = [[5 + index * (7 + seed) % 400 for index in range(70)] for seed in range(3)]
    options = {"kv_cache_dtype": dtype, "max_num_batched_tokens": 16, "max_model_len": 128, "threads": 1}
    with LLM(folder, kv_cache_memory=4 << 20, **options) as llm:
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
        block_bytes = llm._worker.layout.block_bytes
    assert [one.num_cached_tokens for one in again] == [64] * 3
    # Blocks for two prompts, but not for their answers.
    with LLM(folder, kv_cache_memory=10 * block_bytes, **options) as llm:
        tight = llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True), use_tqdm=False)
    for one, two, three in zip(alone, again, tight, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids[:8]
