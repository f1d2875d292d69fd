"""StepBuilder: what the model runner is told of each step, which is what it does not know yet.

Owns what the runner has been told: new requests in full once, differences afterwards. Decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_engine.kv_cache_manager import KVCacheManager
    from pdserve_engine.request import Request

_NOTHING: tuple[int, ...] = ()


class StepBuilder:
    """Makes the output of a scheduler over ``kv``."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        # Of the requests that the runner knows: how many of their blocks it was told.
        self._num_blocks_told: dict[str, int] = {}
        self._to_forget: set[str] = set()

    def build(self, scheduled: Mapping[Request, int], *, queued: bool) -> SchedulerOutput:
        """The step that computes so many tokens of each request; from now on the runner counts as told."""
        new: list[NewRequestData] = []
        known = CachedRequestData()
        for request in scheduled:
            request_id = request.request_id
            num_told = self._num_blocks_told.get(request_id)
            num_blocks = self._kv.num_blocks(request_id)
            if num_told is None:
                new.append(self._describe(request))
            else:
                known.req_ids.append(request_id)
                known.new_block_ids.append(
                    self._kv.block_ids(request_id, num_told) if num_told < num_blocks else _NOTHING
                )
                known.num_computed_tokens.append(request.num_scheduled_tokens)
            self._num_blocks_told[request_id] = num_blocks
        to_forget, self._to_forget = self._to_forget, set()
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=known,
            num_scheduled_tokens={request.request_id: num_tokens for request, num_tokens in scheduled.items()},
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            finished_req_ids=to_forget,
            queued=queued,
        )

    def forget(self, request_id: str) -> None:
        """The runner is to forget the request with the next step, if it knows it."""
        if self._num_blocks_told.pop(request_id, None) is not None:
            self._to_forget.add(request_id)

    def not_told(self, output: SchedulerOutput) -> None:
        """The runner has perhaps not come to forget what this step told it to forget; it is told again."""
        self._to_forget |= output.finished_req_ids

    def _describe(self, request: Request) -> NewRequestData:
        return NewRequestData(
            req_id=request.request_id,
            token_ids=request.token_ids(),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            block_ids=self._kv.block_ids(request.request_id),
            num_computed_tokens=request.num_computed_tokens,
            choice=request.choice,
            prompt_logprobs=request.sampling.prompt_logprobs if request.wants_prompt_logprobs else None,
        )
