"""Logits -> token ids and log probabilities.

The order of operations on a row: logit_bias, repetition penalty, frequency and presence penalty, min_tokens, grammar;
then the largest, or else temperature, min_p, top_k, top_p and one draw. Log probabilities are those of the raw logits,
before all of that.

What a row yields depends on that row, its request's tokens and its parameters alone, not on the rest of the batch; sums
are made in float64, and ties go to the smaller token id. The mathematics is pdserve_kernels.sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pdserve_kernels.sampling import select_sampling
from pdserve_protocol.outputs import TokenLogprobs

from pdserve_engine.sampling_random import uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch
    from pdserve_protocol.sampling import SamplingParams

    from pdserve_engine.grammar import GrammarState

    Row = npt.NDArray[np.float32]

_math = select_sampling()


class Sampled(NamedTuple):
    """``logprobs`` where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class SamplerState:
    """What the sampler remembers of a request: a pure function of its parameters and tokens, kept up to date.

    Args:
        token_ids: prompt and output tokens so far.
        end_token_ids: the model's end ids.
        grammar: at its start; tokens that it does not allow are not chosen.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        *,
        choice: int,
        vocab_size: int,
        end_token_ids: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.choice = choice
        self.num_output_tokens = 0

        def known(ids: Sequence[int]) -> npt.NDArray[np.int64]:
            """An id outside the vocabulary has no logit: nothing to bias or to forbid."""
            return np.array([i for i in ids if 0 <= i < vocab_size], dtype=np.int64)

        self.bias_ids = known(list(params.logit_bias))
        self.biases = np.array([params.logit_bias[int(i)] for i in self.bias_ids], dtype=np.float64)
        self.ends = known(sorted({*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}))
        counts_output = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.output_counts = np.zeros(vocab_size, dtype=np.int32) if counts_output else None
        self.seen = np.zeros(vocab_size, dtype=np.bool_) if params.repetition_penalty != 1 else None
        self._always_adjusts = bool(self.bias_ids.size) or self.output_counts is not None or self.seen is not None
        self._is_greedy = params.temperature == 0 and params.logprobs is None
        if self.seen is not None:
            self.seen[np.array(token_ids[:num_prompt_tokens], dtype=np.int64)] = True
        for token_id in token_ids[num_prompt_tokens:]:
            self.append(token_id)

    @property
    def is_plain_greedy(self) -> bool:
        """The next token is that of the largest raw logit, and nothing else is asked."""
        return self._is_greedy and self.grammar is None and not self._adjusts_values

    @property
    def _adjusts_values(self) -> bool:
        return self._always_adjusts or self.num_output_tokens < self.params.min_tokens

    def keeps(self, token_id: int) -> bool:
        """Whether the token of the largest raw logit is also that of the largest adjusted one."""
        return not self._adjusts_values and (self.grammar is None or self.grammar.allows(token_id))

    def adjusted(self, raw: Row) -> Row:
        """The logits from which the next token is chosen; ``raw`` itself where nothing adjusts them."""
        logits = _adjusted(raw, self) if self._adjusts_values else raw
        if self.grammar is None:
            return logits
        return np.where(self.grammar.allowed(), logits, np.float32(-np.inf))

    def append(self, token_id: int) -> None:
        """Takes note of one more output token."""
        self.num_output_tokens += 1
        if self.output_counts is not None:
            self.output_counts[token_id] += 1
        if self.seen is not None:
            self.seen[token_id] = True
        if self.grammar is not None:
            self.grammar.append(token_id)


def sample(logits_NV: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
    """One token for each row; the states are not changed.

    Args:
        logits_NV: float32 on the CPU, contiguous, one row per state.
    """
    sampled = [Sampled(token_id, None) for token_id in _math.argmax(logits_NV)]
    others = [index for index, state in enumerate(states) if not state.is_plain_greedy]
    if others:
        rows = logits_NV.numpy()
        for index in others:
            sampled[index] = _sample_row(rows[index], sampled[index].token_id, states[index])
    return sampled


def logprobs_of(logits_NV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log probabilities of a given token for each row, and of the ``num_top`` most probable ones.

    Args:
        logits_NV: float32 on the CPU, contiguous.
    """
    rows = logits_NV.numpy()
    return [_logprobs(row, token_id, num_top) for row, token_id in zip(rows, token_ids, strict=True)]


def _sample_row(raw: Row, greedy_id: int, state: SamplerState) -> Sampled:
    params = state.params
    if params.temperature == 0:
        token_id = greedy_id if state.keeps(greedy_id) else int(state.adjusted(raw).argmax())
    else:
        token_id = _math.draw(
            state.adjusted(raw),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            random=uniform(params.seed, state.choice, state.num_output_tokens),
        )
    return Sampled(token_id, None if params.logprobs is None else _logprobs(raw, token_id, params.logprobs))


def _adjusted(raw: Row, state: SamplerState) -> Row:
    """Logits after bias, penalties and min_tokens; a copy, rounded to float32 again at its end."""
    params, logits = state.params, raw.astype(np.float64)
    logits[state.bias_ids] += state.biases
    if state.seen is not None:
        seen = logits[state.seen]
        logits[state.seen] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if state.output_counts is not None:
        logits -= params.frequency_penalty * state.output_counts
        logits -= params.presence_penalty * (state.output_counts > 0)
    # An output that is complete has to end.
    if state.num_output_tokens < params.min_tokens and not (state.grammar is not None and state.grammar.is_complete):
        logits[state.ends] = -np.inf
    return logits.astype(np.float32)


def _logprobs(raw: Row, token_id: int, num_top: int) -> TokenLogprobs:
    logprob, log_total, rank = _math.log_probability(raw, token_id)
    top = _math.first_tokens(raw, num_top) if num_top > 0 else []
    return TokenLogprobs(
        token_id=token_id,
        logprob=logprob,
        rank=rank,
        top=[(i, float(raw[i]) - log_total) for i in top],
    )
