"""Engines over the fake executor, small enough that every limit is reached."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from pdserve_engine.block_hash import BlockHasher
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core import EngineCore, EngineLimits
from pdserve_engine.fake_executor import FakeExecutor
from pdserve_engine.kv_cache_manager import KVCacheManager
from pdserve_engine.oracle import expected_tokens
from pdserve_engine.scheduler import Scheduler
from pdserve_protocol.outputs import Failed, Finished
from pdserve_protocol.requests import AddRequest, ReceiveFrom, SendTo
from pdserve_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from pdserve_engine.grammar import Grammars
    from pdserve_engine.scheduler import StepResult
    from pdserve_engine.scheduler_output import ModelRunnerOutput, SchedulerOutput

BLOCK = 4
VOCAB = 1000
SEND = SendTo(host="127.0.0.1", port=1, boot_id="d")
RECEIVE = ReceiveFrom(boot_id="p")


class Engine:
    """An EngineCore with its fake device, a clock that rises by one per call, and all that came out of it.

    Args:
        depth: steps that ``run`` keeps in flight.

    Attributes:
        tokens: request -> output tokens, by position.
        ends: request -> every end it got; more than one is a fault.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        block_size: int = BLOCK,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 10_000,
        end_token_ids: Sequence[int] = (),
        prefix_caching: bool = True,
        decode_on_after_s: float = math.inf,
        itl_target_s: float | None = None,
        manual: bool = False,
        depth: int = 1,
        grammars: Grammars | None = None,
    ) -> None:
        self.depth = depth
        self.executor = FakeExecutor(num_blocks, block_size, VOCAB, manual=manual)
        hasher = BlockHasher("model", block_size, b"key") if prefix_caching else None
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                decode_on_after_s=decode_on_after_s,
                itl_target_s=itl_target_s,
            ),
            KVCacheManager(num_blocks, block_size, hasher),
            max_model_len=max_model_len,
            end_token_ids=end_token_ids,
        )
        limits = EngineLimits(max_model_len=max_model_len, kv_capacity_tokens=num_blocks * block_size, vocab_size=VOCAB)
        self.core = EngineCore(self.scheduler, self.executor, limits, grammars)
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[object]] = {}
        self._futures: deque[Future[ModelRunnerOutput]] = deque()
        self._blocks_of_steps: deque[dict[str, list[int]]] = deque()

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> None:
        sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, temperature=0.0)
        message = AddRequest(id=request_id, boot_id="b", prompt_token_ids=list(prompt), sampling=sampling, **fields)
        self.core.add_request(message, self.tick())
        self.tokens[request_id] = list(message.output_token_ids)
        self.ends.setdefault(request_id, [])

    def begin(self) -> bool:
        """Starts a step, or queues one behind that in flight; whether there was one to start."""
        future = self.core.begin_step(self.tick())
        if future is None:
            return False
        self._futures.append(future)
        self._blocks_of_steps.append({request_id: self.scheduler.block_ids(request_id) for request_id in self.tokens})
        return True

    @property
    def num_in_flight(self) -> int:
        return len(self._futures)

    def blocks_being_written(self) -> list[set[int]]:
        """Blocks that each step in flight writes to."""
        return [
            self._blocks_written(step.output, blocks)
            for step, blocks in zip(self.scheduler._steps, self._blocks_of_steps, strict=True)
        ]

    def _blocks_written(self, step: SchedulerOutput, blocks: dict[str, list[int]]) -> set[int]:
        cached = step.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {
            blocks[request_id][position // self.scheduler.kv.block_size]
            for request_id, num_tokens in step.num_scheduled_tokens.items()
            for position in range(computed[request_id], computed[request_id] + num_tokens)
        }

    def complete(self) -> list[StepResult]:
        """Ends the oldest step in flight and notes its results."""
        if self.executor.manual:
            self.executor.complete()
        self._blocks_of_steps.popleft()
        results = self.core.finish_step(self._futures.popleft(), self.tick())
        for result in results:
            self.note(result)
        return results

    def note(self, result: StepResult) -> None:
        request_id = result.request.request_id
        assert result.position == len(self.tokens[request_id])
        self.tokens[request_id] += result.new_token_ids
        if result.finish is not None:
            self.ends[request_id].append(result.finish)

    def step(self) -> list[StepResult]:
        return self.complete() if self.begin() else []

    def run(self, limit: int = 1000) -> None:
        """Steps until there is nothing to compute."""
        for _ in range(limit):
            while self.num_in_flight < self.depth and self.begin():
                pass
            if not self._futures:
                return
            self.complete()
        raise AssertionError(f"still busy after {limit} steps")

    def abort(self, request_id: str) -> None:
        if self.core.abort(request_id, self.tick()) is not None:
            self.ends[request_id].append("aborted")

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def check_blocks(self) -> None:
        usage = self.scheduler.usage()
        assert usage.free + usage.cached + usage.held + usage.in_use == usage.total
        assert min(usage.free, usage.cached, usage.held, usage.in_use) >= 0

    def check_empty(self) -> None:
        """Everything has ended once and no block is in use."""
        self.check_blocks()
        usage = self.scheduler.usage()
        assert usage.free + usage.cached == usage.total
        assert not self.scheduler.requests
        assert not self.scheduler.has_schedulable()
        assert {request_id: len(ends) for request_id, ends in self.ends.items() if len(ends) != 1} == {}
        assert not [end for ends in self.ends.values() for end in ends if isinstance(end, Failed)]

    def finished(self, request_id: str) -> Finished:
        (end,) = self.ends[request_id]
        assert isinstance(end, Finished)
        return end


def transfer(sender: Engine, receiver: Engine, request_id: str, needed: Sequence[int]) -> None:
    """Copies the KV of a HELD request block by block, by index in the sequence."""
    sources, targets = sender.scheduler.block_ids(request_id), receiver.scheduler.block_ids(request_id)
    for index in needed:
        receiver.executor.write_block(targets[index], sender.executor.read_block(sources[index]))


def oracle(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the fake model answers to a prompt."""
    return expected_tokens(prompt, num_tokens, VOCAB)
