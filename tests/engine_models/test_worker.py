from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from pdserve_engine import kv_memory
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig
from pdserve_engine.errors import ContextTooLong, ContractBroken, NoRoomForCache
from pdserve_engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from pdserve_engine.worker import Worker
from pdserve_kernels.quantized_cache import scales_of
from pdserve_kernels.select import select_backend
from pdserve_kv_transfer.wire import NUMBERS, rows_of
from pdserve_protocol.node import KVLayout, kv_block_bytes
from pdserve_protocol.sampling import SamplingParams
from support.driver import Driver, make_worker
from support.models import tiny_model, write_model


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    return make_worker(write_model(tmp_path_factory.mktemp("model"), "llama"), num_blocks=8)


def test_layout_and_cache(worker):
    assert worker.layout == KVLayout(
        block_size=16,
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        dtype="float32",
        block_bytes=2 * 2 * 2 * 16 * 16 * 4,
        order=select_backend().kv_order,
    )
    assert worker.kv_cache.shape == (8, 2, 2, 2, 16, 16)
    assert worker.kv_cache.data_ptr() % 4096 == 0
    assert (worker.max_model_len, worker.vocab_size, worker.num_blocks) == (4096, 512, 8)


@pytest.mark.parametrize("order", ["GL2SD", "LG2SD"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_lie_where_conversions_look_for_them(order, dtype):
    layout = KVLayout(
        block_size=16,
        num_layers=5,
        num_kv_heads=3,
        head_dim=8,
        dtype=dtype,
        block_bytes=kv_block_bytes(3 * 5 * 2 * 16, 8, dtype),
        order=order,
    )
    cache = kv_memory.as_tensor(torch.from_numpy(kv_memory.allocate(2, layout)), layout)
    rows = rows_of(layout, NUMBERS[dtype])
    assert cache.shape == (2, 3, 5, 2, 16, 8)
    assert cache.stride()[1:] == (*(stride * 8 for stride in rows.strides), 1)
    if rows.scales_at is not None:
        assert scales_of(cache).stride()[1:] == rows.strides


def test_kv_bytes_are_the_memory_of_the_cache(worker):
    data = worker.kv_bytes()
    assert (data.dtype, data.shape) == (np.uint8, (8, worker.layout.block_bytes))
    data[3] = np.frombuffer(np.full(worker.layout.block_bytes // 4, 1.5, dtype=np.float32).tobytes(), dtype=np.uint8)
    assert torch.equal(worker.kv_cache[3], torch.full_like(worker.kv_cache[3], 1.5))
    assert worker.kv_cache[2].count_nonzero() == worker.kv_cache[4].count_nonzero() == 0
    data[3] = 0


def test_a_copied_block_serves_as_well_as_a_computed_one(tmp_path):
    folder = write_model(tmp_path, "qwen3")
    sender, receiver = Driver(make_worker(folder)), Driver(make_worker(folder))
    prompt = list(range(10, 50))
    whole = sender.add(prompt)
    sender.step(whole)
    other = receiver.add(prompt, output=whole.output)
    other.block_ids, other.num_computed_tokens = [7, 3, 5], len(prompt)
    for source, target in zip(whole.block_ids, other.block_ids, strict=True):
        receiver.worker.kv_bytes()[target] = sender.worker.kv_bytes()[source]
    expected = sender.run(whole, num_tokens=20)
    assert receiver.run(other, num_tokens=20) == expected


def test_identity_is_that_of_model_and_arithmetic(tmp_path, worker):
    again = make_worker(write_model(tmp_path, "llama"))
    assert (again.model_id, again.numerics) == (worker.model_id, worker.numerics)
    other = make_worker(write_model(tmp_path, "llama", seed=1), dtype="bfloat16")
    assert other.model_id != worker.model_id
    assert other.numerics != worker.numerics
    assert other.layout.dtype == "bfloat16"


def test_end_ids_come_from_every_file_that_names_one(tmp_path):
    folder = tiny_model(tmp_path, eos_token_id=[2, 9])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert set(make_worker(folder).end_token_ids) == {0, 2, 9}


def test_default_cache_is_a_quarter_of_free_memory_and_4_gib_at_most(monkeypatch):
    layout = KVLayout(block_size=16, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_bytes=1 << 20)
    monkeypatch.setattr(kv_memory, "free_memory", lambda: 8 << 30)
    assert kv_memory.num_blocks(CacheConfig(), layout) == 2048
    monkeypatch.setattr(kv_memory, "free_memory", lambda: 64 << 30)
    assert kv_memory.num_blocks(CacheConfig(), layout) == 4096
    assert kv_memory.num_blocks(CacheConfig(memory_bytes=10 << 20), layout) == 10
    with pytest.raises(NoRoomForCache):
        kv_memory.num_blocks(CacheConfig(memory_bytes=1000), layout)
    assert kv_memory.num_blocks(CacheConfig(num_blocks=3), layout) == 3


def test_free_memory_is_plausible():
    assert 1 << 20 < kv_memory.free_memory() < 1 << 50


def test_context_beyond_the_model_is_refused(tmp_path):
    folder = write_model(tmp_path, "llama")
    with pytest.raises(ContextTooLong, match="5000 exceeds the 4096"):
        Worker(EngineConfig(model=ModelConfig(path=folder, dtype="float32", max_model_len=5000)))


def step(new: list[NewRequestData], cached: CachedRequestData, scheduled: dict[str, int]) -> SchedulerOutput:
    return SchedulerOutput(new, cached, scheduled, sum(scheduled.values()), {}, set())


def test_steps_that_contradict_what_was_said_before_are_refused(tmp_path):
    worker = make_worker(write_model(tmp_path, "llama"), num_blocks=8)
    request = NewRequestData("a", [5, 6, 7], 3, SamplingParams(temperature=0.0), [0], 0)
    with pytest.raises(ContractBroken, match="not known"):
        worker.execute_model(step([], CachedRequestData(["a"], [[]], [0]), {"a": 1}))
    with pytest.raises(ContractBroken, match="3 tokens and 1 blocks"):
        worker.execute_model(step([request], CachedRequestData(), {"a": 4}))
    with pytest.raises(ContractBroken, match="announced as new"):
        worker.execute_model(step([request], CachedRequestData(), {"a": 3}))


def test_a_step_without_requests_only_forgets(worker):
    output = worker.execute_model(SchedulerOutput([], CachedRequestData(), {}, 0, {}, {"never seen"}))
    assert output.sampled_token_ids == {}


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_resumed(tmp_path):
    driver = Driver(make_worker(write_model(tmp_path, "llama")))
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, repetition_penalty=1.1, logprobs=2)
    prompt = list(range(100, 121))
    alone = driver.add(prompt, sampling, choice=1)
    driver.run(alone, num_tokens=30)
    batched = driver.add(prompt, sampling, choice=1, chunks=[4, 9])
    driver.run(driver.add([5, 6]), batched, driver.add(prompt, sampling, choice=2), num_tokens=30)
    resumed = driver.add(prompt, sampling, choice=1, output=alone.output[:11])
    driver.run(resumed, num_tokens=30)
    assert alone.output == batched.output == resumed.output
    assert len(alone.logprobs) == 30
    assert [entry.token_id for entry in alone.logprobs] == alone.output
