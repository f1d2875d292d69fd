"""The values that scheduler and model runner exchange. Neither reaches into the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_protocol.outputs import PromptLogprobs, TokenLogprobs
    from pdserve_protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request the runner has not seen, or has forgotten (it was preempted): everything about it.

    Attributes:
        token_ids: prompt and output tokens known so far.
        num_prompt_tokens: how many of token_ids are the prompt.
        block_ids: its KV blocks, by block index in the sequence.
        num_computed_tokens: tokens whose KV is in those blocks already.
        choice: choice index, part of the counter of its random numbers.
        prompt_logprobs: most probable tokens to report beside each prompt token that is computed; None reports nothing.
    """

    req_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    choice: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """Differences since the last step for requests the runner knows; the lists are parallel.

    Attributes:
        new_block_ids: blocks to append.
    """

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[Sequence[int]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step computes.

    Attributes:
        num_scheduled_tokens: request -> tokens to compute, from its num_computed_tokens on, in batch order.
        scheduled_spec_decode_tokens: request -> draft tokens to verify (part of the contract; empty).
        finished_req_ids: ended or preempted since the last step; the runner forgets them.
        queued: made while the step before it was in flight, so that it counts on what that one will have computed and
            sampled. Where that one fails, this one must not be computed.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    finished_req_ids: set[str]
    queued: bool = False


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step yielded.

    Attributes:
        sampled_token_ids: request -> new tokens; absent or empty where the step did not reach the last known token.
        logprobs: request -> one entry per new token, for requests that asked.
        prompt_logprobs: request -> those of the prompt tokens that come after computed ones, for requests that asked.
    """

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
