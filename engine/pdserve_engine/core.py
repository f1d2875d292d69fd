"""EngineCore: accepts requests, makes steps, counts what was done.

Joins a Scheduler and an Executor. No sockets, no threads and no clock of its own: whoever drives it passes the time and
says when a step's future is done.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING

import msgspec

from pdserve_engine.errors import BadRequest, DoesNotFit, StepNotRun
from pdserve_engine.request import Request
from pdserve_engine.step_pace import StepPace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from pdserve_protocol.requests import AddRequest
    from pdserve_protocol.sampling import SamplingParams
    from pdserve_text.grammar import GrammarMatcher

    from pdserve_engine.counters import EngineCounters, Outcome
    from pdserve_engine.executor import Executor
    from pdserve_engine.grammar import Grammars
    from pdserve_engine.scheduler import Scheduler, StepResult
    from pdserve_engine.scheduler_output import ModelRunnerOutput, SchedulerOutput


MAX_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What a request must keep to.

    Attributes:
        max_model_len: prompt and output tokens at most.
        kv_capacity_tokens: tokens that the whole KV cache holds.
    """

    max_model_len: int
    kv_capacity_tokens: int
    vocab_size: int


class EngineCore:
    """One engine. Between ``begin_step`` and ``finish_step`` everything else may be called.

    Attributes:
        pace: how long steps take. It says when to begin a step while another is in flight; heeding it is the caller's
            matter, since an offline caller has nobody to wait for.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, limits: EngineLimits, grammars: Grammars | None = None
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.limits = limits
        self._grammars = grammars
        self.pace = StepPace()
        self._steps: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()

    @property
    def counters(self) -> EngineCounters:
        return self.scheduler.counters

    @property
    def step_in_flight(self) -> bool:
        return bool(self._steps)

    def add_request(
        self,
        message: AddRequest,
        now: float,
        when_compiled: Callable[[Request, Future[GrammarMatcher]], None] | None = None,
    ) -> Request:
        """Takes a request, whole or one half, into the scheduler.

        Args:
            when_compiled: told on another thread that its grammar was compiled, well or not, which is then to be told
                to ``grammar_compiled``; all others go on meanwhile. Without it a grammar is compiled at once.

        Raises:
            DoesNotFit: it could never be computed, however long it waited.
            BadRequest: a field has a value that the engine cannot work with, or the id is taken.
        """
        self._check(message)
        sampling, grammar = message.sampling, message.sampling.grammar
        if message.receive_from is not None:
            # The node that computes the prompt reports them.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        request = Request(
            request_id=message.id,
            prompt_token_ids=list(message.prompt_token_ids),
            output_token_ids=list(message.output_token_ids),
            sampling=sampling,
            choice=message.choice,
            cache_salt=message.cache_salt,
            priority=message.priority,
            hands_over=message.send_to is not None,
            receiver=message.send_to.boot_id if message.send_to is not None else "",
        )
        if grammar is not None:
            assert self._grammars is not None, "checked"
            if when_compiled is None:
                request.grammar = self._grammars.compile(grammar)
            else:
                request.waits_for_grammar = True
                self._grammars.begin_compile(grammar).add_done_callback(partial(when_compiled, request))
        if message.receive_from is not None:
            self.scheduler.add_waiting_for_kv(request, now)
        else:
            self.scheduler.add_request(request, now)
        return request

    def grammar_compiled(self, request: Request, future: Future[GrammarMatcher]) -> None:
        """The request may start. Raises BadRequest where its grammar has a fault: then it never does."""
        request.grammar = future.result()
        self.scheduler.grammar_compiled(request)

    def abort(self, request_id: str, now: float, outcome: Outcome = "aborted") -> Request | None:
        """Ends a request in whatever state; None where the id is unknown (it may just have ended)."""
        return self.scheduler.finish(request_id, now, outcome)

    def begin_step(self, now: float) -> Future[ModelRunnerOutput] | None:
        """Starts the next step, or queues it behind the one in flight.

        None where two are in flight or nothing can be computed now.
        """
        if len(self._steps) == MAX_STEPS_IN_FLIGHT:
            return None
        scheduler_output = self.scheduler.schedule(now)
        if scheduler_output is None:
            return None
        self.pace.begun(scheduler_output.total_num_scheduled_tokens, now)
        future = self.executor.execute_model(scheduler_output)
        self._steps.append((scheduler_output, future))
        return future

    def finish_step(self, future: Future[ModelRunnerOutput], now: float) -> list[StepResult]:
        """Takes in the oldest step in flight, whose future is done.

        A step that failed fails its requests and no others: their results carry Failed("internal"). What was queued
        behind it is not run and has no results; its requests that live are computed in a later step.

        Args:
            now: when it was done.
        """
        scheduler_output, in_flight = self._steps.popleft()
        assert future is in_flight, "not the oldest step in flight"
        error = future.exception()
        self.pace.ended(now, computed=error is None)
        if error is None:
            self._observe(scheduler_output)
            return self.scheduler.update_from_output(scheduler_output, future.result(), now)
        if isinstance(error, StepNotRun):
            self.scheduler.skip_step(scheduler_output)
            return []
        return self.scheduler.fail_step(scheduler_output, f"{type(error).__name__}: {error}", now)

    def _observe(self, scheduler_output: SchedulerOutput) -> None:
        assert self.pace.last is not None, "the step was computed"
        num_decodes = sum(num == 1 for num in scheduler_output.num_scheduled_tokens.values())
        num_prompt_tokens = scheduler_output.total_num_scheduled_tokens - num_decodes
        self.scheduler.prompt_share.observe(num_decodes, num_prompt_tokens, self.pace.last.seconds)

    def step(self, clock: Callable[[], float]) -> list[StepResult]:
        """Waits for the oldest step, with another queued behind it; its results, none where nothing is to do.

        Steps may be in flight afterwards. A step may have no results: look at ``step_in_flight`` and the scheduler for
        whether there is more.
        """
        while self.begin_step(clock()) is not None:
            pass
        if not self._steps:
            return []
        _, future = self._steps[0]
        wait([future])
        return self.finish_step(future, clock())

    def close(self) -> None:
        """Waits for the steps under way and releases the device. Idempotent."""
        self.executor.close()
        if self._grammars is not None:
            self._grammars.close()

    # ---- checks --------------------------------------------------------------------------------------------------

    def _check(self, message: AddRequest) -> None:
        if message.id in self.scheduler.requests:
            raise BadRequest(f"a request with id {message.id} is running")
        if message.send_to is not None and message.receive_from is not None:
            raise BadRequest("a request cannot both receive its KV and hand it over")
        if not isfinite(message.timeout_s):
            raise BadRequest(f"timeout_s: {message.timeout_s} is no time")
        if not message.prompt_token_ids:
            raise BadRequest("the prompt is empty")
        self._check_ids("prompt", message.prompt_token_ids)
        self._check_ids("output", message.output_token_ids)
        self._check_ids("stop_token_ids", message.sampling.stop_token_ids)
        self._check_ids("logit_bias", message.sampling.logit_bias)
        _check_sampling(message.sampling, self.limits.vocab_size)
        if len(message.output_token_ids) >= message.sampling.max_tokens:
            raise BadRequest("the output is complete: it has max_tokens tokens")
        self._check_length(message)
        if message.sampling.grammar is not None and self._grammars is None:
            raise BadRequest("grammar: this node has no tokenizer to go with it")

    def _check_ids(self, field: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.limits.vocab_size:
                raise BadRequest(f"{field}: token id {token_id} is not in 0..{self.limits.vocab_size - 1}")

    def _check_length(self, message: AddRequest) -> None:
        # A half that hands over samples one token.
        num_output = len(message.output_token_ids) + 1 if message.send_to is not None else message.sampling.max_tokens
        num_tokens = len(message.prompt_token_ids) + num_output
        if num_tokens > self.limits.max_model_len:
            raise DoesNotFit(num_tokens, self.limits.max_model_len, "context length")
        if num_tokens > self.limits.kv_capacity_tokens:
            raise DoesNotFit(num_tokens, self.limits.kv_capacity_tokens, "KV cache")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Routers have validated all this; a value that would break the step of others is refused once more."""
    ranges = {
        "max_tokens": (sampling.max_tokens, sampling.max_tokens >= 1),
        "min_tokens": (sampling.min_tokens, sampling.min_tokens >= 0),
        "temperature": (sampling.temperature, isfinite(sampling.temperature) and sampling.temperature >= 0),
        "top_k": (sampling.top_k, 0 <= sampling.top_k < 1 << 31),
        "top_p": (sampling.top_p, 0 < sampling.top_p <= 1),
        "min_p": (sampling.min_p, 0 <= sampling.min_p <= 1),
        "presence_penalty": (sampling.presence_penalty, isfinite(sampling.presence_penalty)),
        "frequency_penalty": (sampling.frequency_penalty, isfinite(sampling.frequency_penalty)),
        "repetition_penalty": (
            sampling.repetition_penalty,
            0.01 <= sampling.repetition_penalty <= 100,
        ),
        "logit_bias": (sampling.logit_bias, all(isfinite(bias) for bias in sampling.logit_bias.values())),
        "logprobs": (sampling.logprobs, sampling.logprobs is None or 0 <= sampling.logprobs <= vocab_size),
        "prompt_logprobs": (
            sampling.prompt_logprobs,
            sampling.prompt_logprobs is None or 0 <= sampling.prompt_logprobs <= vocab_size,
        ),
    }
    for name, (value, good) in ranges.items():
        if not good:
            raise BadRequest(f"{name}: {value} is out of range")
