"""What a GPU worker does around a model, on CPU tensors with Triton's interpreter: buffers, padding, graphs, copies.

A graph is stood for by the launches themselves, done again over the same buffers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve_engine.decode_graphs import graph_size, graph_sizes, is_decode
from pdserve_engine.device import find_device
from pdserve_engine.device_cache import TorchDeviceCache
from pdserve_engine.device_model import DeviceModel
from pdserve_engine.errors import NoCudaDevice
from pdserve_engine.kv_memory import num_blocks
from pdserve_engine.model_runner import ModelRunner
from pdserve_engine.step_buffers import StepBuffers
from pdserve_engine.worker import Worker
from pdserve_kernels.interface import AttentionMetadata
from pdserve_protocol.node import KVLayout
from pdserve_protocol.sampling import SamplingParams
from support.driver import Driver
from support.models import tiny_qwen3

pytest.importorskip("triton")

MAX_SEQS, MAX_TOKENS, MAX_LEN = 3, 16, 32


class Replays:
    """decode_graphs.Capture without a device."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def __call__(self, run):
        self.num_captured += 1
        result = run().clone()

        def replay() -> None:
            self.num_replayed += 1
            result.copy_(run())

        return result, replay


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode_metadata(*seq_lens: int) -> AttentionMetadata:
    return AttentionMetadata(
        positions_T=ints(*seq_lens) - 1,
        slots_T=ints(*range(len(seq_lens))),
        query_start_R1=torch.arange(len(seq_lens) + 1).int(),
        seq_lens_R=ints(*seq_lens),
        block_tables_RP=torch.ones(len(seq_lens), 2, dtype=torch.int32),
        query_lens=[1] * len(seq_lens),
        seq_lens=list(seq_lens),
    )


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (64, [1, 2, 4, 8, 16, 32, 64])]
)
def test_sizes_of_graphs(max_num_seqs, sizes):
    assert graph_sizes(max_num_seqs) == sizes
    for num_seqs in range(1, max_num_seqs + 1):
        size = graph_size(sizes, num_seqs)
        assert size is not None
        assert num_seqs <= size < 2 * num_seqs
    assert graph_size(sizes, max_num_seqs + 1) is None


def test_a_decode_step_is_padded_by_rows_that_touch_nothing():
    buffers = StepBuffers(max_num_tokens=8, max_num_seqs=6, max_num_blocks=3, device=torch.device("cpu"))
    token_ids_T, metadata, rows_N = buffers.decode_views(4, max_model_len=48)
    addresses = [tensor.data_ptr() for tensor in (token_ids_T, metadata.slots_T, metadata.block_tables_RP)]
    buffers.load_decode(ints(7, 8, 9, 6), decode_metadata(3, 9, 20, 4), 4)
    buffers.load_decode(ints(7, 8), decode_metadata(3, 9), 4)
    assert token_ids_T.tolist() == [7, 8, 0, 0]
    assert metadata.slots_T.tolist() == [0, 1, -1, -1]
    assert metadata.seq_lens_R.tolist() == [3, 9, 0, 0]
    assert metadata.positions_T.tolist() == [2, 8, 0, 0]
    assert metadata.query_start_R1.tolist() == [0, 1, 2, 3, 4]
    assert metadata.block_tables_RP[:2, :2].eq(1).all()
    assert metadata.block_tables_RP.shape == (4, 3)
    assert rows_N.tolist() == [0, 1, 2, 3]
    assert metadata.seq_lens == [48] * 4
    again = buffers.decode_views(4, max_model_len=48)
    assert addresses == [tensor.data_ptr() for tensor in (again[0], again[1].slots_T, again[1].block_tables_RP)]


def test_what_is_a_decode_step():
    assert is_decode(decode_metadata(3, 9))
    chunk = decode_metadata(3, 9)
    object.__setattr__(chunk, "positions_T", ints(1, 2, 8))
    assert not is_decode(chunk)


class Setup:
    """A Triton worker on the CPU whose steps go the way of a GPU's."""

    def __init__(self, folder) -> None:
        config = EngineConfig(
            model=ModelConfig(path=folder, dtype="float32", max_model_len=MAX_LEN),
            cache=CacheConfig(block_size=16, num_blocks=6),
            scheduler=SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS),
            num_threads=1,
        )
        self.worker = Worker(config, backend="triton")
        self.capture = Replays()
        model = self.worker._runner._model
        self.worker._runner = ModelRunner(
            DeviceModel(
                model,
                self.worker.kv_cache,
                max_num_tokens=MAX_TOKENS,
                max_num_seqs=MAX_SEQS,
                max_model_len=MAX_LEN,
                capture=self.capture,
            ),
            self.worker.kv_cache,
            config.scheduler,
            max_model_len=MAX_LEN,
            end_token_ids=self.worker.end_token_ids,
        )
        self.driver = Driver(self.worker)


def outputs(driver: Driver) -> list[list[int]]:
    """Two requests, greedy and drawn, and one in chunks of a single token, which want no logits: those steps are decode
    steps for graphs."""
    decoding = [driver.add([5, 6, 7]), driver.add([9], SamplingParams(temperature=0.9, seed=3))]
    chunked = driver.add(list(range(20, 38)), chunks=[16, 1])
    driver.step(*decoding)
    driver.step(chunked)
    driver.step(chunked, *decoding)
    return driver.run(*decoding, chunked, num_tokens=3)


@pytest.mark.slow
def test_tokens_and_cache_are_those_of_the_plain_worker(tmp_path):
    folder = tiny_qwen3(tmp_path / "model", layers=1, heads=2, kv_heads=1)
    plain = Worker(
        EngineConfig(
            model=ModelConfig(path=folder, dtype="float32", max_model_len=MAX_LEN),
            cache=CacheConfig(block_size=16, num_blocks=6),
            scheduler=SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS),
            num_threads=1,
        ),
        backend="torch",
    )
    expected = outputs(Driver(plain))
    setup = Setup(folder)
    assert outputs(setup.driver) == expected
    torch.testing.assert_close(setup.worker.kv_cache, plain.kv_cache, rtol=1e-4, atol=1e-4)
    # Places that no request has stay as they were: padding wrote nowhere.
    assert torch.equal(setup.worker.kv_cache.any(5), plain.kv_cache.any(5))
    assert (setup.capture.num_captured, setup.capture.num_replayed) == (len(graph_sizes(MAX_SEQS)), 4)


def test_the_bytes_of_a_cache_on_a_device():
    cache = torch.arange(3 * 8, dtype=torch.float32).view(3, 2, 1, 2, 1, 2)
    device_cache = TorchDeviceCache(cache.view(3, -1).view(torch.uint8))
    assert device_cache.shape == (3, 32)
    data = np.empty(32, dtype=np.uint8)
    device_cache.read(1, data)
    assert np.array_equal(data.view(np.float32), np.arange(8, 16))
    device_cache.write(2, data)
    assert torch.equal(cache[2], cache[1])


def test_devices_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    with pytest.raises(NoCudaDevice):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert find_device("auto") == find_device("cuda") == torch.device("cuda", 0)
    assert find_device("cpu") == torch.device("cpu")


def test_the_cache_takes_most_of_a_gpu():
    layout = KVLayout(block_size=16, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_bytes=100)
    assert num_blocks(CacheConfig(), layout, device_memory=10_000) == 85
    assert num_blocks(CacheConfig(memory_bytes=1000), layout, device_memory=10_000) == 10
