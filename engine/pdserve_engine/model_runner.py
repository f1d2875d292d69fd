"""SchedulerOutput -> tensors -> logits -> tokens.

Owns what is remembered of requests between steps. Knows neither queues nor the ends of requests: a token is sampled for
each request whose last known token this step computes, and is then known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from pdserve_protocol.outputs import PromptLogprobs

from pdserve_engine.errors import ContractBroken
from pdserve_engine.input_batch import InputBatch
from pdserve_engine.sampler import SamplerState, logprobs_of, sample
from pdserve_engine.scheduler_output import ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve_engine.config import SchedulerConfig
    from pdserve_engine.device_model import DeviceModel
    from pdserve_engine.grammar import Grammars
    from pdserve_engine.models.decoder import Decoder
    from pdserve_engine.scheduler_output import NewRequestData, SchedulerOutput


class _WantedLogprobs(NamedTuple):
    num_prompt_tokens: int
    num_top: int


class _ScoredPrompt(NamedTuple):
    """``num_tokens`` prompt tokens from ``position`` on, whose log probabilities a step yields."""

    req_id: str
    position: int
    num_tokens: int
    num_top: int


class ModelRunner:
    """Runs steps of one model over one KV cache.

    Args:
        kv_cache: [num_blocks, kv_heads, layers, 2, block_size, head_dim].
        end_token_ids: the model's end ids, which min_tokens forbids.
        grammars: of requests that have one; None where none does.
    """

    def __init__(
        self,
        model: Decoder | DeviceModel,
        kv_cache: torch.Tensor,
        scheduler_config: SchedulerConfig,
        *,
        max_model_len: int,
        end_token_ids: Sequence[int],
        grammars: Grammars | None = None,
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._kv_cache = kv_cache
        self._end_token_ids = tuple(end_token_ids)
        self._prompt_logprobs: dict[str, _WantedLogprobs] = {}
        # Requests with a grammar.
        self._masked: set[str] = set()
        self._batch = InputBatch(
            max_num_seqs=scheduler_config.max_num_seqs,
            max_num_tokens=max(scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs),
            max_model_len=max_model_len,
            block_size=kv_cache.shape[4],
        )

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step.

        Raises:
            ContractBroken: the step contradicts the steps before it.
        """
        starts = self._update(step)
        counts = step.num_scheduled_tokens
        if not counts:
            return ModelRunnerOutput({}, {})
        # Decodes first: they are the rows that every step has.
        req_ids = [i for i, count in counts.items() if count == 1] + [i for i, count in counts.items() if count != 1]
        token_ids_T, metadata, sampling = self._batch.make_step(
            req_ids, [starts[i] for i in req_ids], [counts[i] for i in req_ids]
        )
        all_sample = len(sampling) == len(req_ids)
        sampled_req_ids = req_ids if all_sample else [req_ids[index] for index in sampling]
        if self._masked:
            self._begin_masks(sampled_req_ids)
        rows = sampling
        if step.total_num_scheduled_tokens > len(req_ids):
            rows = metadata.query_start_R1.numpy()[sampling + 1].astype(np.int64) - 1
        prompts = self._prompts(req_ids, starts, counts) if self._prompt_logprobs else []
        if prompts:
            first = dict(zip(req_ids, metadata.query_start_R1[:-1].tolist(), strict=True))
            rows = np.concatenate([rows, *(np.arange(p.num_tokens) + first[p.req_id] for p in prompts)])
        logits_NV = self._model.forward(token_ids_T, metadata, self._kv_cache, torch.from_numpy(rows))
        if not prompts:
            return self._sample(logits_NV, sampled_req_ids)
        prompt_logprobs = self._score(prompts, logits_NV[len(sampling) :])
        return replace(self._sample(logits_NV[: len(sampling)], sampled_req_ids), prompt_logprobs=prompt_logprobs)

    def _prompts(
        self, req_ids: Sequence[str], starts: Mapping[str, int], counts: Mapping[str, int]
    ) -> list[_ScoredPrompt]:
        """The prompt tokens whose log probabilities are wanted and follow from what the step computes."""
        prompts = []
        for req_id in req_ids:
            wanted = self._prompt_logprobs.get(req_id)
            if wanted is not None:
                num_tokens = min(counts[req_id], wanted.num_prompt_tokens - 1 - starts[req_id])
                if num_tokens > 0:
                    prompts.append(_ScoredPrompt(req_id, starts[req_id] + 1, num_tokens, wanted.num_top))
        return prompts

    def _score(self, prompts: Sequence[_ScoredPrompt], logits_NV: torch.Tensor) -> dict[str, PromptLogprobs]:
        """Log probabilities of prompt tokens, given the logits of the tokens before them."""
        scores, row = {}, 0
        for p in prompts:
            token_ids = self._batch.token_ids(p.req_id, p.position, p.position + p.num_tokens)
            tokens = logprobs_of(logits_NV[row : row + p.num_tokens], token_ids, p.num_top)
            scores[p.req_id] = PromptLogprobs(position=p.position, tokens=tokens)
            row += p.num_tokens
        return scores

    def _begin_masks(self, req_ids: Sequence[str]) -> None:
        """Masks are computed while the model runs."""
        for state in self._batch.sampler_states(req_ids):
            if state.grammar is not None:
                state.grammar.begin_mask()

    def _sample(self, logits_NV: torch.Tensor, req_ids: list[str]) -> ModelRunnerOutput:
        """One token for each request; it is known from now on."""
        if not req_ids:
            return ModelRunnerOutput({}, {})
        states = self._batch.sampler_states(req_ids)
        samples = sample(logits_NV, states)
        token_ids = [sampled.token_id for sampled in samples]
        for state, token_id in zip(states, token_ids, strict=True):
            state.append(token_id)
        self._batch.append_sampled(req_ids, token_ids)
        return ModelRunnerOutput(
            sampled_token_ids={req_id: [token_id] for req_id, token_id in zip(req_ids, token_ids, strict=True)},
            logprobs={
                req_id: [sampled.logprobs]
                for req_id, sampled in zip(req_ids, samples, strict=True)
                if sampled.logprobs is not None
            },
        )

    def _update(self, step: SchedulerOutput) -> dict[str, int]:
        """Brings what is remembered up to this step; returns the first token to compute by request."""
        for req_id in step.finished_req_ids:
            self._batch.remove(req_id)
            self._prompt_logprobs.pop(req_id, None)
            self._masked.discard(req_id)
        for new in step.scheduled_new_reqs:
            self._batch.add(new.req_id, new.token_ids, new.block_ids, self._sampler_state(new))
            if new.sampling.grammar is not None:
                self._masked.add(new.req_id)
            if new.prompt_logprobs is not None:
                self._prompt_logprobs[new.req_id] = _WantedLogprobs(new.num_prompt_tokens, new.prompt_logprobs)
        cached = step.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids:
                self._batch.append_blocks(req_id, block_ids)
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update((new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs)
        return starts

    def _sampler_state(self, new: NewRequestData) -> SamplerState:
        grammar = None
        if new.sampling.grammar is not None:
            if self._grammars is None:
                raise ContractBroken(new.req_id, "it has a grammar, and there are none here")
            grammar = self._grammars.state(new.sampling.grammar)
        return SamplerState(
            new.sampling,
            new.token_ids,
            new.num_prompt_tokens,
            choice=new.choice,
            vocab_size=self._model.config.vocab_size,
            end_token_ids=self._end_token_ids,
            grammar=grammar,
        )
