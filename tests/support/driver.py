"""Drives a Worker with steps written by hand: whole control of chunks, batches and blocks, no scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from pdserve_engine import kv_memory
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve_engine.input_batch import InputBatch
from pdserve_engine.models.config import read_config
from pdserve_engine.models.decoder import Decoder
from pdserve_engine.sampler import SamplerState
from pdserve_engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from pdserve_engine.weights import load_weights
from pdserve_engine.worker import Worker, block_layout
from pdserve_kernels.select import select_backend
from pdserve_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from pdserve_engine.config import CacheDType
    from pdserve_kernels.interface import Quantization
    from pdserve_protocol.outputs import TokenLogprobs


def make_worker(folder: Path, *, dtype: Any = "float32", block_size: int = 16, num_blocks: int = 64) -> Worker:
    """A worker on one thread with a small cache."""
    return Worker(
        EngineConfig(
            model=ModelConfig(path=folder, dtype=dtype),
            cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=2048),
            num_threads=1,
        )
    )


@dataclass
class Sequence:
    """One request; ``chunks`` are the sizes of its next steps, after which each step takes all that is left."""

    req_id: str
    token_ids: list[int]
    sampling: SamplingParams
    num_prompt_tokens: int
    choice: int = 0
    chunks: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    known: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """Hands out blocks and steps. Blocks go out in an order that is not the order of their ids."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._free = [*range(0, worker.num_blocks, 2), *range(1, worker.num_blocks, 2)]
        self._finished: set[str] = set()
        self._count = 0

    def add(
        self,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        *,
        output: list[int] | None = None,
        chunks: list[int] | None = None,
        choice: int = 0,
    ) -> Sequence:
        """A request with ``output`` as tokens that it has generated before."""
        self._count += 1
        sampling = sampling or SamplingParams(temperature=0.0)
        token_ids = [*prompt, *(output or [])]
        return Sequence(f"r{self._count}", token_ids, sampling, len(prompt), choice, list(chunks or []))

    def step(self, *sequences: Sequence) -> None:
        """One step: the next chunk of each sequence."""
        new: list[NewRequestData] = []
        cached = CachedRequestData()
        scheduled: dict[str, int] = {}
        for sequence in sequences:
            remaining = len(sequence.token_ids) - sequence.num_computed_tokens
            count = min(sequence.chunks.pop(0), remaining) if sequence.chunks else remaining
            end = sequence.num_computed_tokens + count
            num_blocks = -(-end // self.worker.layout.block_size)
            blocks = [self._free.pop(0) for _ in range(num_blocks - len(sequence.block_ids))]
            sequence.block_ids += blocks
            scheduled[sequence.req_id] = count
            if sequence.known:
                cached.req_ids.append(sequence.req_id)
                cached.new_block_ids.append(blocks)
                cached.num_computed_tokens.append(sequence.num_computed_tokens)
            else:
                new.append(
                    NewRequestData(
                        sequence.req_id,
                        list(sequence.token_ids),
                        sequence.num_prompt_tokens,
                        sequence.sampling,
                        list(sequence.block_ids),
                        sequence.num_computed_tokens,
                        sequence.choice,
                    )
                )
                sequence.known = True
            sequence.num_computed_tokens = end
        finished, self._finished = self._finished, set()
        output = self.worker.execute_model(
            SchedulerOutput(new, cached, scheduled, sum(scheduled.values()), {}, finished)
        )
        for sequence in sequences:
            sequence.token_ids += output.sampled_token_ids.get(sequence.req_id, [])
            sequence.logprobs += output.logprobs.get(sequence.req_id, [])

    def run(self, *sequences: Sequence, num_tokens: int) -> list[list[int]]:
        """Steps all sequences together until each has generated ``num_tokens``; returns their outputs."""
        while unfinished := [s for s in sequences if len(s.output) < num_tokens]:
            self.step(*unfinished)
        for sequence in sequences:
            self.finish(sequence)
        return [sequence.output for sequence in sequences]

    def finish(self, sequence: Sequence) -> None:
        """The runner forgets it in the next step, and its blocks are free."""
        self._finished.add(sequence.req_id)
        self._free = sequence.block_ids + self._free
        sequence.block_ids, sequence.known = [], False


@torch.inference_mode()
def all_logits(
    folder: Path,
    dtype: str,
    token_ids: list[int],
    chunk: int | None = None,
    quantization: Quantization | None = None,
    kv_cache_dtype: CacheDType = "auto",
) -> torch.Tensor:
    """Logits [len(token_ids), vocab] after each token, computed in chunks where that is asked."""
    config = read_config(folder)
    weights = load_weights(folder, getattr(torch, dtype))
    kernels = select_backend(quantization=quantization)
    model = Decoder(config, weights, kernels, config.max_position_embeddings)
    num_blocks = -(-len(token_ids) // 16)
    layout = block_layout(config, 16, dtype if kv_cache_dtype == "auto" else kv_cache_dtype, kernels.kv_order)
    kv_cache = kv_memory.as_tensor(torch.from_numpy(kv_memory.allocate(num_blocks, layout)), layout)
    size = len(token_ids)
    batch = InputBatch(max_num_seqs=1, max_num_tokens=size, max_model_len=size, block_size=16)
    state = SamplerState(SamplingParams(), [], 0, choice=0, vocab_size=config.vocab_size, end_token_ids=[])
    batch.add("r", token_ids, list(range(num_blocks))[::-1], state)
    parts = []
    for start in range(0, size, chunk or size):
        end = min(start + (chunk or size), size)
        tokens, metadata, _ = batch.make_step(["r"], [start], [end - start])
        parts.append(model.forward(tokens, metadata, kv_cache, torch.arange(end - start)).clone())
    return torch.cat(parts)
