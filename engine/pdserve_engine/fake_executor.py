"""FakeExecutor: an engine's device without a model, which checks everything it is told.

The next token is a hash of all tokens before it, so that it does not depend on chunks, caching or preemption, and the
KV entry of a position is a hash of the tokens up to it. Every step verifies each entry that a model would read: a block
that is stale, reused too early or in the wrong place fails the step at once.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from pdserve_protocol.outputs import PromptLogprobs, TokenLogprobs

from pdserve_engine.errors import ContractBroken, StepNotRun, WrongKV
from pdserve_engine.scheduler_output import ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_engine.scheduler_output import NewRequestData, SchedulerOutput

Entry = bytes


def kv_entries(token_ids: Sequence[int], before: Entry = b"") -> list[Entry]:
    """KV entry of every position, given the entry of the position before the first."""
    entries = []
    for token_id in token_ids:
        before = blake2b(before + token_id.to_bytes(4, "little"), digest_size=8).digest()
        entries.append(before)
    return entries


def next_token(entry: Entry, vocab_size: int) -> int:
    """The token after the position with this entry."""
    return int.from_bytes(entry, "little") % vocab_size


def expected_tokens(token_ids: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What the fake model generates after ``token_ids``, if nothing ends it."""
    entry = kv_entries(token_ids)[-1]
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(next_token(entry, vocab_size))
        entry = kv_entries(tokens[-1:], entry)[0]
    return tokens


@dataclass(slots=True)
class _Known:
    """A request as the runner knows it; ``entries`` are what the KV of its tokens must be."""

    token_ids: list[int]
    block_ids: list[int]
    entries: list[Entry]
    wants_logprobs: bool
    num_scored_tokens: int


class FakeExecutor:
    """Executor over an imaginary device with ``num_blocks`` blocks.

    Args:
        manual: steps wait for ``complete`` (the device is slow); otherwise ``execute_model`` returns them done.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, *, manual: bool = False) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.manual = manual
        self.num_steps = 0
        self._kv: list[list[Entry]] = [[b""] * block_size for _ in range(num_blocks)]
        self._known: dict[str, _Known] = {}
        self._pending: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._error: Exception | None = None
        self._failed = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        self._pending.append((scheduler_output, future))
        if not self.manual:
            self.complete()
        return future

    def close(self) -> None:
        while self._pending:
            self.complete()

    def complete(self) -> None:
        """Computes the oldest step that waits; only now does it read and write the KV cache."""
        scheduler_output, future = self._pending.popleft()
        if scheduler_output.queued and self._failed:
            future.set_exception(StepNotRun())
            return
        self.num_steps += 1
        try:
            future.set_result(self._run(scheduler_output))
            self._failed = False
        except (WrongKV, ContractBroken, FakeDeviceError) as error:
            self._failed = True
            future.set_exception(error)

    def fail_next(self, message: str) -> None:
        """Lets the next step fail before it does anything."""
        self._error = FakeDeviceError(message)

    def read_block(self, block_id: int) -> list[Entry]:
        """Content of a block, as a sender of KV reads it."""
        return list(self._kv[block_id])

    def write_block(self, block_id: int, entries: Sequence[Entry]) -> None:
        """Replaces the content of a block, as a receiver of KV does."""
        assert len(entries) == self.block_size
        self._kv[block_id] = list(entries)

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._update(step)
        output = ModelRunnerOutput(sampled_token_ids={}, logprobs={})
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        if computed.keys() != step.num_scheduled_tokens.keys():
            raise ContractBroken("*", "scheduled tokens and requests differ")
        if sum(step.num_scheduled_tokens.values()) != step.total_num_scheduled_tokens:
            raise ContractBroken("*", "the total is not the sum")
        # A batch writes before it reads, so that two requests of one step cannot disturb each other unnoticed.
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            self._write(request_id, computed[request_id], num_tokens)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            self._sample(request_id, computed[request_id] + num_tokens, output)
            self._score(request_id, computed[request_id] + 1, num_tokens, output)
        return output

    def _update(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids:
            self._known.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            if new.req_id in self._known:
                raise ContractBroken(new.req_id, "new, but known")
            self._known[new.req_id] = self._make_known(new)
        cached = step.scheduled_cached_reqs
        for request_id, token_ids, block_ids in zip(
            cached.req_ids, cached.new_token_ids, cached.new_block_ids, strict=True
        ):
            if request_id not in self._known:
                raise ContractBroken(request_id, "not new, but not known")
            known = self._known[request_id]
            known.block_ids.extend(block_ids)
            self._append(known, token_ids)

    def _make_known(self, new: NewRequestData) -> _Known:
        wants_logprobs = new.sampling.logprobs is not None
        num_scored = new.num_prompt_tokens if new.prompt_logprobs is not None else 0
        return _Known(list(new.token_ids), list(new.block_ids), kv_entries(new.token_ids), wants_logprobs, num_scored)

    def _append(self, known: _Known, token_ids: Sequence[int]) -> None:
        known.entries.extend(kv_entries(token_ids, known.entries[-1]))
        known.token_ids.extend(token_ids)

    def _write(self, request_id: str, start: int, num_tokens: int) -> None:
        known = self._known[request_id]
        if num_tokens < 1 or start + num_tokens > len(known.token_ids):
            raise ContractBroken(request_id, f"{num_tokens} tokens from {start} of {len(known.token_ids)}")
        if start + num_tokens > len(known.block_ids) * self.block_size:
            raise ContractBroken(request_id, f"{len(known.block_ids)} blocks for {start + num_tokens} tokens")
        for position in range(start, start + num_tokens):
            index, offset = divmod(position, self.block_size)
            self._kv[known.block_ids[index]][offset] = known.entries[position]

    def _sample(self, request_id: str, end: int, output: ModelRunnerOutput) -> None:
        known = self._known[request_id]
        for position in range(end):
            index, offset = divmod(position, self.block_size)
            block_id = known.block_ids[index]
            if self._kv[block_id][offset] != known.entries[position]:
                raise WrongKV(request_id, position, block_id)
        if end < len(known.token_ids):
            return
        token_id = next_token(known.entries[-1], self.vocab_size)
        output.sampled_token_ids[request_id] = [token_id]
        if known.wants_logprobs:
            output.logprobs[request_id] = [TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1)]
        self._append(known, [token_id])

    def _score(self, request_id: str, position: int, count: int, output: ModelRunnerOutput) -> None:
        """A prompt token's rank is its position."""
        known = self._known[request_id]
        stop = min(position + count, known.num_scored_tokens)
        if position < stop:
            tokens = [TokenLogprobs(token_id=known.token_ids[i], logprob=-0.5, rank=i) for i in range(position, stop)]
            output.prompt_logprobs[request_id] = PromptLogprobs(position=position, tokens=tokens)


class FakeDeviceError(RuntimeError):
    """The failure that ``fail_next`` asked for."""
