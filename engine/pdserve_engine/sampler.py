"""Logits -> token ids and log probabilities.

The order of operations on a row: logit_bias, repetition penalty, frequency and presence penalty, min_tokens; then the
largest, or else temperature, min_p, top_k, top_p and one draw. Log probabilities are those of the raw logits, before
all of that.

What a row yields depends on that row, its request's tokens and its parameters alone, not on the rest of the batch: each
row is worked on by itself, in float64, and ties go to the smaller token id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pdserve_protocol.outputs import TokenLogprobs

from pdserve_engine.sampling_random import uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch
    from pdserve_protocol.sampling import SamplingParams

    Row = npt.NDArray[np.float64]

_FIRST_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Sampled:
    """``logprobs`` where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class SamplerState:
    """What the sampler remembers of a request: a pure function of its parameters and tokens, kept up to date.

    Args:
        token_ids: prompt and output tokens so far.
        end_token_ids: the model's end ids.
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
    ) -> None:
        self.params = params
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
        if self.seen is not None:
            self.seen[np.array(token_ids[:num_prompt_tokens], dtype=np.int64)] = True
        for token_id in token_ids[num_prompt_tokens:]:
            self.append(token_id)

    @property
    def is_plain_greedy(self) -> bool:
        """The next token is that of the largest raw logit, and nothing else is asked."""
        return (
            self.params.temperature == 0
            and self.params.logprobs is None
            and not self.bias_ids.size
            and self.output_counts is None
            and self.seen is None
            and self.num_output_tokens >= self.params.min_tokens
        )

    def append(self, token_id: int) -> None:
        """Takes note of one more output token."""
        self.num_output_tokens += 1
        if self.output_counts is not None:
            self.output_counts[token_id] += 1
        if self.seen is not None:
            self.seen[token_id] = True


def sample(logits_NV: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
    """One token for each row; the states are not changed.

    Args:
        logits_NV: float32, one row per state.
    """
    greedy_ids: list[int] = logits_NV.argmax(dim=-1).tolist()
    if all(state.is_plain_greedy for state in states):
        return [Sampled(token_id, None) for token_id in greedy_ids]
    rows = logits_NV.numpy(force=True)
    return [
        Sampled(token_id, None) if state.is_plain_greedy else _sample_row(row.astype(np.float64), state)
        for token_id, row, state in zip(greedy_ids, rows, states, strict=True)
    ]


def _sample_row(raw: Row, state: SamplerState) -> Sampled:
    params = state.params
    logits = _adjusted(raw, state)
    if params.temperature == 0:
        token_id = int(logits.argmax())
    else:
        random = uniform(params.seed, state.choice, state.num_output_tokens)
        token_id = _draw(logits / params.temperature, params, random)
    return Sampled(token_id, None if params.logprobs is None else _logprobs(raw, token_id, params.logprobs))


def _adjusted(raw: Row, state: SamplerState) -> Row:
    """Logits after bias, penalties and min_tokens; a copy."""
    params, logits = state.params, raw.copy()
    logits[state.bias_ids] += state.biases
    if state.seen is not None:
        seen = logits[state.seen]
        logits[state.seen] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if state.output_counts is not None:
        logits -= params.frequency_penalty * state.output_counts
        logits -= params.presence_penalty * (state.output_counts > 0)
    if state.num_output_tokens < params.min_tokens:
        logits[state.ends] = -np.inf
    return logits


def _draw(logits: Row, params: SamplingParams, random: float) -> int:
    """The token where the cumulative probability of the kept tokens, in order of their ids, passes ``random``."""
    logits -= logits.max()
    if params.min_p > 0:
        logits[logits < math.log(params.min_p)] = -np.inf
    if 0 < params.top_k < logits.size or params.top_p < 1:
        kept = np.sort(_nucleus(logits, params))
        cumulative = np.exp(logits[kept]).cumsum()
        return int(kept[_passes(cumulative, random)])
    return _passes(np.exp(logits).cumsum(), random)


def _passes(cumulative: Row, random: float) -> int:
    # A target equal to the total would be past the last token; one below it is never at a token of probability 0.
    target = min(random * cumulative[-1], np.nextafter(cumulative[-1], 0.0))
    return int(cumulative.searchsorted(target, side="right"))


def _nucleus(logits: Row, params: SamplingParams) -> npt.NDArray[np.int64]:
    """Ids kept by top_k, then top_p of what top_k left (Holtzman et al., 2020), most probable first."""
    limit = params.top_k if 0 < params.top_k < logits.size else logits.size
    total = float(np.exp(logits).sum()) if limit == logits.size else math.nan
    num_candidates = limit if limit < logits.size else _FIRST_CANDIDATES
    while True:
        ids = _most_probable(logits, min(num_candidates, limit))
        cumulative = np.exp(logits[ids]).cumsum()
        mass = params.top_p * (cumulative[-1] if math.isnan(total) else total)
        if params.top_p >= 1:
            return ids
        if cumulative[-1] >= mass or len(ids) == limit:
            return ids[: int(cumulative.searchsorted(mass, side="left")) + 1]
        num_candidates *= 16


def _most_probable(logits: Row, count: int) -> npt.NDArray[np.int64]:
    """Ids of the ``count`` largest, largest first, equal ones by id."""
    if count < logits.size:
        threshold = np.partition(logits, logits.size - count)[logits.size - count]
        candidates = np.flatnonzero(logits >= threshold)
    else:
        candidates = np.arange(logits.size)
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order][:count]


def _logprobs(raw: Row, token_id: int, num_top: int) -> TokenLogprobs:
    largest = raw.max()
    log_total = largest + math.log(np.exp(raw - largest).sum())
    top: list[int] = _most_probable(raw, min(num_top, raw.size)).tolist() if num_top > 0 else []
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(raw[token_id] - log_total),
        rank=1 + int((raw > raw[token_id]).sum()),
        top=[(i, float(raw[i] - log_total)) for i in top],
    )
