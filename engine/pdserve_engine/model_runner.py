"""SchedulerOutput -> tensors -> logits -> tokens.

Owns what is remembered of requests between steps. Knows neither queues nor the ends of requests: a token is sampled for
each request whose last known token this step computes, and is then known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve_engine.input_batch import InputBatch
from pdserve_engine.sampler import SamplerState, sample
from pdserve_engine.scheduler_output import ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_protocol.outputs import TokenLogprobs

    from pdserve_engine.config import SchedulerConfig
    from pdserve_engine.models.decoder import Decoder
    from pdserve_engine.scheduler_output import NewRequestData, SchedulerOutput


class ModelRunner:
    """Runs steps of one model over one KV cache.

    Args:
        kv_cache: [num_blocks, kv_heads, layers, 2, block_size, head_dim].
        end_token_ids: the model's end ids, which min_tokens forbids.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: torch.Tensor,
        scheduler_config: SchedulerConfig,
        *,
        max_model_len: int,
        end_token_ids: Sequence[int],
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._end_token_ids = tuple(end_token_ids)
        self._batch = InputBatch(
            max_num_seqs=scheduler_config.max_num_seqs,
            max_num_tokens=max(scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs),
            max_model_len=max_model_len,
            block_size=kv_cache.shape[4],
        )

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step.

        Raises:
            ContractBroken: the step contradicts the steps before it.
        """
        starts = self._update(step)
        spans = []
        # Decodes first: they are the rows that every step has.
        for req_id, count in sorted(step.num_scheduled_tokens.items(), key=lambda item: item[1] > 1):
            spans.append((self._batch.get(req_id), starts[req_id], starts[req_id] + count))
        if not spans:
            return ModelRunnerOutput({}, {})
        token_ids_T, metadata = self._batch.make_step(spans)
        sampling, rows, row = [], [], -1
        for request, start, end in spans:
            row += end - start
            if end == request.num_tokens:
                sampling.append(request)
                rows.append(row)
        rows_N = torch.tensor(rows, dtype=torch.int64)
        logits_NV = self._model.forward(token_ids_T, metadata, self._kv_cache, rows_N)
        if not sampling:
            return ModelRunnerOutput({}, {})
        sampled_token_ids: dict[str, list[int]] = {}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        samples = sample(logits_NV, [request.sampler_state for request in sampling])
        for request, sampled in zip(sampling, samples, strict=True):
            request.sampler_state.append(sampled.token_id)
            self._batch.append_tokens(request.req_id, [sampled.token_id])
            sampled_token_ids[request.req_id] = [sampled.token_id]
            if sampled.logprobs is not None:
                logprobs[request.req_id] = [sampled.logprobs]
        return ModelRunnerOutput(sampled_token_ids, logprobs)

    def _update(self, step: SchedulerOutput) -> dict[str, int]:
        """Brings what is remembered up to this step; returns the first token to compute by request."""
        for req_id in step.finished_req_ids:
            self._batch.remove(req_id)
        starts = {}
        for new in step.scheduled_new_reqs:
            self._batch.add(new.req_id, new.token_ids, new.block_ids, self._sampler_state(new))
            starts[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for req_id, token_ids, block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_token_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            for token_id in token_ids:
                self._batch.get(req_id).sampler_state.append(token_id)
            self._batch.append_tokens(req_id, token_ids)
            self._batch.append_blocks(req_id, block_ids)
            starts[req_id] = num_computed_tokens
        return starts

    def _sampler_state(self, new: NewRequestData) -> SamplerState:
        return SamplerState(
            new.sampling,
            new.token_ids,
            new.num_prompt_tokens,
            choice=new.choice,
            vocab_size=self._model.config.vocab_size,
            end_token_ids=self._end_token_ids,
        )
