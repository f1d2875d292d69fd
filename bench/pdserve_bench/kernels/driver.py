"""A worker, and steps for it that are written by hand: whole control of batches, and no scheduler in the measure.

Decode requests are not prefilled: their keys and values are random numbers, written to the cache before the first step.
(Memory that was never written would be one page of zeros, which is read from the nearest cache.)
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve_engine.models.config import read_config
from pdserve_engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from pdserve_engine.worker import Worker
from pdserve_kernels.quantized_cache import is_quantized, scales_of
from pdserve_kernels.select import select_backend
from pdserve_protocol.node import kv_block_bytes
from pdserve_protocol.sampling import SamplingParams

from pdserve_bench.errors import BadOption
from pdserve_bench.kernels.timed import TimedBackend

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

    from pdserve_engine.config import CacheDType

    from pdserve_bench.kernels.config import KernelsBench, Scenario

_BLOCK_SIZE = 16


class Driver:
    """One backend's worker with room for ``num_steps`` steps of every scenario of ``bench``.

    Attributes:
        backend: times its operations.
        model_config: of the model.
        itemsize, kv_itemsize: bytes of a number, and of one in the KV cache.

    Raises:
        BadOption: steps longer than the model's context.
    """

    def __init__(self, bench: KernelsBench, folder: Path, backend: str, num_steps: int, random: Random) -> None:
        self.model_config = read_config(folder)
        self.itemsize: int = getattr(torch, bench.dtype).itemsize
        self.kv_itemsize = _kv_itemsize(self.itemsize, self.model_config.head_dim, bench.kv_cache_dtype)
        kernels = select_backend(
            backend, dtype=getattr(torch, bench.dtype), quantized_cache=bench.kv_cache_dtype != "auto"
        )
        self.backend = TimedBackend(kernels, self.model_config, self.itemsize, self.kv_itemsize)
        max_batch, max_prefill = max(bench.batch_sizes, default=0), max(bench.prefill_lens, default=0)
        # All decodes share requests, and each step makes them a token longer: halfway they have ``context`` tokens.
        num_steps_of = [num_steps * sum(size > index for size in bench.batch_sizes) for index in range(max_batch)]
        self._starts = [max(bench.context - count // 2, 1) for count in num_steps_of]
        ends = [start + count for start, count in zip(self._starts, num_steps_of, strict=True)]
        longest = max([*ends, max_prefill])
        limit = self.model_config.max_position_embeddings
        if longest > limit:
            raise BadOption("--context or --prefill-lens", longest, f"the model's context is {limit} tokens")
        blocks_each = -(-max(ends, default=0) // _BLOCK_SIZE)
        prefill_blocks = -(-max_prefill // _BLOCK_SIZE)
        self.worker = Worker(
            EngineConfig(
                model=ModelConfig(path=folder, dtype=bench.dtype, max_model_len=longest),
                cache=CacheConfig(
                    block_size=_BLOCK_SIZE,
                    dtype=bench.kv_cache_dtype,
                    num_blocks=max_batch * blocks_each + prefill_blocks,
                ),
                scheduler=SchedulerConfig(max_num_seqs=max_batch + 1, max_num_batched_tokens=max(max_prefill, 1)),
                num_threads=bench.threads,
            ),
            backend=self.backend,
        )
        _fill(self.worker.kv_cache)
        blocks = list(range(self.worker.num_blocks))
        # In no order, as in a pool that has run for a while.
        random.shuffle(blocks)
        self._blocks = [blocks[index * blocks_each : (index + 1) * blocks_each] for index in range(max_batch)]
        self._prefill_blocks = blocks[max_batch * blocks_each :]
        self._lens: dict[int, int] = {}
        self._finished: set[str] = set()
        self._num_prefills = 0
        self._random = random

    def step(self, scenario: Scenario) -> tuple[float, list[int], list[int]]:
        """Computes one step; seconds, and the query and sequence lengths of its requests."""
        if scenario.kind == "decode":
            step, lens = self._decode(scenario.num_tokens)
            query_lens = [1] * len(lens)
        else:
            step = self._prefill(scenario.num_tokens)
            query_lens = lens = [scenario.num_tokens]
        start = time.perf_counter()
        self.worker.execute_model(step)
        return time.perf_counter() - start, query_lens, lens

    def _decode(self, num: int) -> tuple[SchedulerOutput, list[int]]:
        """The next token of the first ``num`` requests."""
        new: list[NewRequestData] = []
        cached = CachedRequestData()
        lens = []
        for index in range(num):
            computed = self._lens.get(index)
            if computed is None:
                computed = self._starts[index] - 1
                new.append(self._new(f"d{index}", computed + 1, self._blocks[index], computed))
            else:
                cached.req_ids.append(f"d{index}")
                cached.new_block_ids.append([])
                cached.num_computed_tokens.append(computed)
            self._lens[index] = computed + 1
            lens.append(computed + 1)
        return self._output(new, cached, {f"d{index}": 1 for index in range(num)}), lens

    def _prefill(self, length: int) -> SchedulerOutput:
        """A whole prompt, forgotten in the step after it."""
        self._num_prefills += 1
        req_id = f"p{self._num_prefills}"
        new = [self._new(req_id, length, self._prefill_blocks[: -(-length // _BLOCK_SIZE)], 0)]
        output = self._output(new, CachedRequestData(), {req_id: length})
        self._finished.add(req_id)
        return output

    def _new(self, req_id: str, length: int, blocks: list[int], num_computed_tokens: int) -> NewRequestData:
        token_ids = [self._random.randrange(self.model_config.vocab_size) for _ in range(length)]
        return NewRequestData(
            req_id=req_id,
            token_ids=token_ids,
            num_prompt_tokens=length,
            sampling=SamplingParams(temperature=0.0),
            block_ids=list(blocks),
            num_computed_tokens=num_computed_tokens,
        )

    def _output(
        self, new: list[NewRequestData], cached: CachedRequestData, scheduled: dict[str, int]
    ) -> SchedulerOutput:
        finished, self._finished = self._finished, set()
        return SchedulerOutput(new, cached, scheduled, sum(scheduled.values()), {}, finished)


def _kv_itemsize(itemsize: int, head_dim: int, kv_cache_dtype: CacheDType) -> float:
    """Bytes of a number of keys and values, with its share of a scale."""
    return itemsize if kv_cache_dtype == "auto" else kv_block_bytes(1, head_dim, kv_cache_dtype) / head_dim


def _fill(kv_cache: torch.Tensor) -> None:
    if not is_quantized(kv_cache):
        kv_cache.normal_()
        return
    # Codes of 0 to 63 are numbers in int8 and in e4m3.
    kv_cache.view(torch.uint8).random_(0, 64)
    scales_of(kv_cache).uniform_(0.01, 0.02)
