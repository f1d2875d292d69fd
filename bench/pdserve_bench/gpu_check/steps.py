"""Decode steps of one worker: with graphs and launch by launch, the same tokens, and times against the memory floor."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve_engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from pdserve_engine.worker import Worker
from pdserve_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve_engine.device import Device

_FULL_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """``step_s``: median. ``tokens``: of each request, prompt apart."""

    step_s: float
    tokens: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsConfig:
    """``prompt_len``: of every request. ``num_steps``: decode steps of a run."""

    folder: Path
    device: Device
    prompt_len: int
    num_steps: int
    batch_sizes: Sequence[int]
    block_size: int = 16


def run_decodes(config: StepsConfig, *, enforce_eager: bool) -> dict[int, DecodeResult]:
    """By batch size: prompts of random tokens, then ``num_steps`` decode steps of all of them together."""
    blocks_each = -(-(config.prompt_len + config.num_steps + 1) // config.block_size)
    largest = max(config.batch_sizes)
    worker = Worker(
        EngineConfig(
            model=ModelConfig(path=config.folder),
            cache=CacheConfig(block_size=config.block_size, num_blocks=largest * blocks_each),
            scheduler=SchedulerConfig(
                max_num_seqs=largest, max_num_batched_tokens=max(_FULL_TOKENS, config.prompt_len)
            ),
            device=config.device,
            enforce_eager=enforce_eager,
        )
    )
    results = {size: _decode(worker, config, size, blocks_each) for size in config.batch_sizes}
    del worker
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return results


def _decode(worker: Worker, config: StepsConfig, size: int, blocks_each: int) -> DecodeResult:
    generator = torch.Generator().manual_seed(size)
    ids = [f"{size}-{index}" for index in range(size)]
    tokens: dict[str, list[int]] = {req_id: [] for req_id in ids}
    for index, req_id in enumerate(ids):
        prompt = torch.randint(worker.vocab_size, (config.prompt_len,), generator=generator).tolist()
        blocks = list(range(index * blocks_each, (index + 1) * blocks_each))
        new = NewRequestData(req_id, prompt, len(prompt), SamplingParams(temperature=0.0), blocks, 0)
        step = SchedulerOutput([new], CachedRequestData(), {req_id: len(prompt)}, len(prompt), {}, set())
        tokens[req_id] += worker.execute_model(step).sampled_token_ids[req_id]
    times = []
    for count in range(config.num_steps):
        computed = config.prompt_len + count
        cached = CachedRequestData(ids, [[] for _ in ids], [computed] * size)
        step = SchedulerOutput([], cached, dict.fromkeys(ids, 1), size, {}, set())
        began = time.perf_counter()
        output = worker.execute_model(step)
        times.append(time.perf_counter() - began)
        for req_id in ids:
            tokens[req_id] += output.sampled_token_ids[req_id]
    worker.execute_model(SchedulerOutput([], CachedRequestData(), {}, 0, {}, set(ids)))
    # The first steps are warmed up for the later ones.
    return DecodeResult(step_s=statistics.median(times[len(times) // 4 :]), tokens=list(tokens.values()))
