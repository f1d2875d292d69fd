"""Scheduler: which requests compute how many tokens in the next step.

Owns the requests from their arrival to their end, and their order. There are no phases: a request has computed tokens
and known tokens, and every step hands out a budget so that the first catch up with the second. Prefix hits and
transferred KV are just computed tokens. Knows nothing of messages, tensors or clocks.

Steps are made ahead of results: a step may be scheduled while others are in flight. It counts on what they will have
computed and sampled, and a request that turns out to have ended is computed in vain: nothing of it is taken. Steps
retire in their order. Blocks of a request that ends are freed when the last step that may write to them has retired.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdserve_protocol.outputs import Failed, Finished, PromptLogprobs

from pdserve_engine.config import max_logits_rows
from pdserve_engine.counters import EngineCounters, Outcome
from pdserve_engine.holds import Holds
from pdserve_engine.prompt_share import PromptShare
from pdserve_engine.request import Request, RequestEvent, RequestStatus
from pdserve_engine.step_builder import StepBuilder
from pdserve_engine.step_plan import StepPlan
from pdserve_engine.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pdserve_protocol.outputs import TokenLogprobs

    from pdserve_engine.config import SchedulerConfig
    from pdserve_engine.kv_cache_manager import BlockUsage, KVCacheManager
    from pdserve_engine.scheduler_output import ModelRunnerOutput, SchedulerOutput


class StepResult(NamedTuple):
    """What one step did for one request.

    Attributes:
        position: output position of the first of ``new_token_ids``.
        new_token_ids: sampled; empty where the step did not reach the last known token.
        logprobs: one entry per new token, where the request asked for them.
        finish: set where the request is over.
        held: the request has become HELD in this step.
        num_computed_tokens: tokens whose KV is written now.
        prompt_logprobs: those that were not reported before, where the request asked for them.
    """

    request: Request
    position: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: Finished | Failed | None
    held: bool
    num_computed_tokens: int
    prompt_logprobs: PromptLogprobs | None = None


def end_of_output(request: Request, end_token_ids: frozenset[int], max_model_len: int) -> Finished | None:
    """Whether the request ends with its last output token, and why.

    An end or stop id counts only from output position ``min_tokens`` on, as in the sampler.
    """
    sampling = request.sampling
    if not request.output_token_ids:
        return None
    last = request.output_token_ids[-1]
    if request.num_output_tokens > sampling.min_tokens and (
        (last in end_token_ids and not sampling.ignore_eos) or last in sampling.stop_token_ids
    ):
        return Finished(reason="stop", stop_token_id=last)
    if request.num_output_tokens >= sampling.max_tokens or request.num_tokens >= max_model_len:
        return Finished(reason="length")
    return None


def _take_new(request: Request, computed: PromptLogprobs) -> PromptLogprobs | None:
    """Those of a prompt that were not reported before the request was preempted; they count as reported."""
    position = request.num_prompt_logprobs + 1
    tokens = computed.tokens[position - computed.position :]
    request.num_prompt_logprobs += len(tokens)
    return PromptLogprobs(position=position, tokens=tokens) if tokens else None


@dataclass(frozen=True, slots=True, eq=False)
class _StepInFlight:
    """A step that has not retired. ``freed``: blocks of ended requests that it may still write to."""

    output: SchedulerOutput
    requests: list[Request]
    freed: list[list[int]]


class Scheduler:
    """Token-budget scheduler over a KVCacheManager.

    Order in a step: running requests that decode, running ones that still compute known tokens, requests whose KV has
    arrived, preempted ones, new ones by priority. A request is admitted only with blocks for all its known tokens and
    one more. Beside requests that decode the others have the share of the step that ``prompt_share`` says; whoever
    measures steps tells it.

    Args:
        config: ``max_num_seqs`` above ``max_num_batched_tokens`` is lowered to it, so that every running request can
            take part in every step.
        end_token_ids: end ids of the model.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, *, max_model_len: int, end_token_ids: Iterable[int] = ()
    ) -> None:
        self.kv = kv
        self.counters = EngineCounters()
        self.max_model_len = max_model_len
        self._end_token_ids = frozenset(end_token_ids)
        self._token_budget = config.max_num_batched_tokens
        self._max_logits_rows = max_logits_rows(config.max_num_seqs)
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting = WaitingQueue()
        self.holds = Holds(kv, config.decode_on_after_s)
        self.prompt_share = PromptShare(config.itl_target_s, kv.block_size)
        self._steps: deque[_StepInFlight] = deque()
        self._must_drain = False
        self._builder = StepBuilder(kv)

    # ---- what there is -------------------------------------------------------------------------------------------

    @property
    def requests(self) -> Mapping[str, Request]:
        """All requests that have not ended."""
        return self._requests

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first or next step, those that wait for KV not counted."""
        return len(self._waiting)

    @property
    def has_preempted(self) -> bool:
        """Whether a request that gave up its blocks waits for new ones; it comes before anyone else's reservation."""
        return self._waiting.has_preempted

    @property
    def num_waiting_for_kv(self) -> int:
        return sum(request.status is RequestStatus.WAITING_FOR_KV for request in self._requests.values())

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._steps)

    @property
    def prompt_tokens_per_s(self) -> float:
        """At which prompts get on at least, whoever else comes; 0 before that is measured."""
        return self.prompt_share.least_tokens_per_s(self._token_budget)

    def has_schedulable(self) -> bool:
        """Whether ``schedule`` might find something to do. It may still return None where blocks are missing."""
        return bool(self._running or self._waiting)

    def block_ids(self, request_id: str) -> list[int]:
        """Blocks of a request by their index in the sequence; empty where it has none."""
        return self.kv.block_ids(request_id)

    def usage(self) -> BlockUsage:
        """Blocks by state; those of HELD requests count as held."""
        return self.kv.usage(r.request_id for r in self._requests.values() if r.status is RequestStatus.HELD)

    # ---- arrivals ------------------------------------------------------------------------------------------------

    def add_request(self, request: Request, now: float) -> None:
        """Takes a request that computes its prompt here. It must fit: EngineCore has checked."""
        self._arrive(request, RequestStatus.WAITING, now)
        self._waiting.add(request)

    def add_waiting_for_kv(self, request: Request, now: float) -> None:
        """Takes a request whose KV comes from another node: ``reserve`` it, then report ``kv_arrived``."""
        self._arrive(request, RequestStatus.WAITING_FOR_KV, now)

    def reserve(self, request_id: str) -> list[int] | None:
        """Blocks for all known tokens and one more of a request that waits for KV; its own prefix hits are pinned.

        All or nothing. Sets ``num_cached_tokens``.

        Returns:
            Indexes in the sequence of the blocks whose KV is needed (index * block_size = position), perhaps none;
            None where there is no room now.
        """
        request = self._requests[request_id]
        assert request.status is RequestStatus.WAITING_FOR_KV, f"{request_id} does not wait for KV"
        hits = self.kv.find_cached(request, request.num_tokens)
        if not self.kv.allocate(request, request.num_tokens + 1, hits):
            return None
        request.num_cached_tokens = len(hits) * self.kv.block_size
        return list(range(len(hits), self.kv.blocks_for(request.num_tokens)))

    def kv_arrived(
        self, request_id: str, output_token_ids: Sequence[int], num_computed_tokens: int, now: float
    ) -> StepResult | None:
        """The KV of a reserved request is written and verified, or will not come: it is scheduled from now on.

        The request goes ahead of all that are not yet admitted. What is missing of its known tokens is computed here
        and counted as recomputed. Also right for a request without a reservation: it is then computed whole.

        Args:
            output_token_ids: all output tokens so far, beginning with those the request already has.
            num_computed_tokens: tokens whose KV is in the request's blocks, without a hole.

        Returns:
            A result where the given output already ends the request; None otherwise, and for an unknown id.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        assert request.status is RequestStatus.WAITING_FOR_KV, f"{request_id} does not wait for KV"
        num_transferable = request.num_tokens
        position = request.num_output_tokens
        new_token_ids = list(output_token_ids[position:])
        request.output_token_ids.extend(new_token_ids)
        request.stamp(RequestEvent.KV_ARRIVED, now)
        request.num_known_before = max(num_transferable, request.num_tokens - 1)
        if self.kv.num_blocks(request_id):
            self._take_over(request, min(num_computed_tokens, num_transferable))
        finish = end_of_output(request, self._end_token_ids, self.max_model_len)
        if finish is not None:
            num_computed = request.num_computed_tokens
            self.finish(request_id, now, finish.reason)
            return StepResult(request, position, new_token_ids, None, finish, False, num_computed)
        if self.kv.num_blocks(request_id) and request.num_remaining > 0:
            request.status = RequestStatus.WAITING
        else:
            # All is cached but nothing is known to go on from: the last token is computed again, in a block of its own.
            self.kv.free(request_id)
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED
        self._waiting.add(request)
        return None

    # ---- ends ----------------------------------------------------------------------------------------------------

    def finish(self, request_id: str, now: float, outcome: Outcome = "aborted") -> Request | None:
        """Ends a request in whatever state; None where the id is unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, outcome)
        request.stamp(RequestEvent.FINISHED, now)
        return request

    def release_held(self, request_id: str) -> Request | None:
        """The receiver has the KV of a request that is held, or was, and whose KV is computed again: it is over.

        None, and nothing done, for any other request and where the id is unknown.
        """
        request = self._requests.get(request_id)
        if request is None or not (request.refills or request.status is RequestStatus.HELD):
            return None
        self._end(request, "handed_over")
        return request

    def grant(self, request_id: str) -> None:
        """The receiver has room for a request that hands over: it comes before those without a grant.

        Where its blocks were given up meanwhile, they are computed again; its tokens are not sampled again.
        """
        request = self._requests.get(request_id)
        if request is None or request.granted:
            return
        self.holds.discard(request)
        is_waiting = self._waiting.discard(request)
        request.granted = True
        if request.status is RequestStatus.HELD and not self.kv.num_blocks(request_id):
            request.refills = is_waiting = True
            request.status = RequestStatus.WAITING
        if is_waiting:
            self._waiting.add(request)

    def grammar_compiled(self, request: Request) -> None:
        """It need not wait for its grammar any more."""
        is_waiting = self._waiting.discard(request)
        request.waits_for_grammar = False
        if is_waiting:
            self._waiting.add(request)

    def next_to_start(self) -> Request | None:
        """The request at the head of the queue, with or without room for it; those of a full share are passed over."""
        return next(filter(self.holds.may_start, self._waiting.to_start()), None)

    def num_blocks_before(self, request: Request) -> int:
        """Blocks that the next request to start needs, if it came before ``request``, which waits for KV."""
        head = self.next_to_start()
        return self.kv.blocks_for(head.num_tokens + 1) if head is not None and head.is_older_than(request) else 0

    def rename_held(self, old_id: str, new_id: str, receiver: str) -> Request | None:
        """A HELD request goes on under another id, for another receiver; None where it is not there or not HELD."""
        request = self._requests.get(old_id)
        if request is None or request.status is not RequestStatus.HELD or new_id in self._requests:
            return None
        self.holds.discard(request)
        del self._requests[old_id]
        self.kv.rename(old_id, new_id)
        request.request_id, request.receiver, request.granted = new_id, receiver, False
        self._requests[new_id] = request
        self.holds.add(request)
        return request

    def reset_prefix_cache(self) -> tuple[int, int]:
        """Forgets all cached blocks: (forgotten, left because they are in use)."""
        return self.kv.pool.reset_prefix_cache()

    # ---- steps ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next step, which is in flight from now on.

        None where nothing can be computed now. While a step is in flight, that may be because a request would have to
        give up blocks, or because a step has failed: ask again when it has retired.
        """
        if self._must_drain:
            return None
        decodes, prompts = self._to_advance()
        num_decodes = len(decodes) + self._waiting.num_arrived or min(1, self._num_reserved())
        num_prompt_tokens = self.prompt_share.num_tokens(num_decodes, self._token_budget)
        plan = StepPlan(self._token_budget, num_prompt_tokens, self._max_logits_rows)
        num_preemptions = self.counters.preemptions
        if not self._advance_running(decodes + prompts, plan):
            return None
        # What a victim has given up is not for new work, unless nobody else wants it.
        self._admit(plan, now, arrived_only=bool(plan.scheduled) and num_preemptions < self.counters.preemptions)
        if not plan.scheduled and not self._steps:
            self._decode_on(plan, now)
        return self._fly(plan.scheduled) if plan.scheduled else None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput, now: float
    ) -> list[StepResult]:
        """Retires the oldest step in flight: one result for each of its requests that has not ended meanwhile."""
        requests = self._retire(scheduler_output)
        num_scheduled_tokens = scheduler_output.num_scheduled_tokens
        sampled_token_ids, logprobs = model_runner_output.sampled_token_ids, model_runner_output.logprobs
        prompt_logprobs = model_runner_output.prompt_logprobs
        results = []
        for request in requests:
            id = request.request_id
            sampled = sampled_token_ids.get(id, ())
            result = self._advance(request, num_scheduled_tokens[id], sampled, logprobs.get(id), now)
            if id in prompt_logprobs:
                result = result._replace(prompt_logprobs=_take_new(request, prompt_logprobs[id]))
            results.append(result)
        return results

    def fail_step(self, scheduler_output: SchedulerOutput, message: str, now: float) -> list[StepResult]:
        """Retires the oldest step in flight, which failed: its requests fail, all others go on.

        The steps behind it will not be run (``skip_step``), and until they have retired there is no new one.
        """
        requests = self._retire(scheduler_output)
        self._must_drain = bool(self._steps)
        self._builder.not_told(scheduler_output)
        results = []
        for request in requests:
            self.finish(request.request_id, now, "failed")
            failed = Failed(code="internal", message=message)
            results.append(StepResult(request, request.num_output_tokens, [], None, failed, False, 0))
        return results

    def skip_step(self, scheduler_output: SchedulerOutput) -> None:
        """Retires the oldest step in flight, which was not run: its requests are where they were before it."""
        for request in self._retire(scheduler_output):
            request.num_tokens_in_flight = 0
            request.num_output_placeholders = 0
            # The runner has not heard of what this step told; it will be told all anew.
            self._builder.forget(request.request_id)
        self._builder.not_told(scheduler_output)

    # ---- within a step -------------------------------------------------------------------------------------------

    def _num_reserved(self) -> int:
        """Streams that begin to decode when their KV has arrived, which may be while the next step runs."""
        return sum(
            request.status is RequestStatus.WAITING_FOR_KV and self.kv.num_blocks(request.request_id) > 0
            for request in self._requests.values()
        )

    def _to_advance(self) -> tuple[list[Request], list[Request]]:
        """Running requests that are not about to end: those that miss one token, and those that miss more.

        Of the latter those come first that have tokens: they were preempted, and somebody waits for their next one.
        """
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self._running:
            if not self._will_end(request):
                (decodes if request.num_remaining == 1 else prompts).append(request)
        prompts.sort(key=lambda request: not request.output_token_ids)
        return decodes, prompts

    def _advance_running(self, requests: list[Request], plan: StepPlan) -> bool:
        """Shares for running requests, for whose blocks others are preempted, and at last they themselves.

        False where one must be preempted, and steps in flight may write its blocks.
        """
        for request in requests:
            share = plan.share(request)
            if share == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue
            while not self.kv.append(request, request.num_scheduled_tokens + share):
                victim = self._victim()
                if victim is None:
                    break
                if self._steps:
                    return False
                plan.drop(victim)
                self._preempt(victim)
                if victim is request:
                    break
            else:
                plan.add(request, share)
        return True

    def _will_end(self, request: Request) -> bool:
        """Whether what steps in flight sample is certain to be the last token that is wanted here."""
        if request.refills:
            return request.num_remaining == 0
        num_coming = request.num_output_placeholders
        return num_coming > 0 and (
            request.hands_over
            or request.num_output_tokens + num_coming >= request.sampling.max_tokens
            or request.num_tokens + num_coming >= self.max_model_len
        )

    def _victim(self) -> Request | None:
        """The latest one of those that matter least."""
        candidates = [request for request in reversed(self._running) if not request.pinned]
        return max(candidates, key=lambda request: request.priority, default=None)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._give_up_blocks(request)

    def _give_up_blocks(self, request: Request) -> None:
        self.kv.free(request.request_id)
        self._builder.forget(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self._waiting.add(request)

    def _admit(self, plan: StepPlan, now: float, *, arrived_only: bool) -> None:
        """Requests whose KV has arrived have their blocks; the others come in order, as long as the first one fits.

        One that has arrived with a hole, or was preempted, may have to wait for a share; who needs none does not wait
        behind it.
        """
        while plan.budget > 0 and plan.num_rows > 0 and len(self._running) < self._max_num_seqs:
            request = self._waiting.first_arrived()
            if request is not None:
                self._waiting.discard(request)
                if not self.kv.append(request, request.num_scheduled_tokens + plan.share(request)):
                    # More tokens were generated elsewhere than there is room for.
                    self._give_up_blocks(request)
                    return
            else:
                has_share = plan.num_prompt_tokens > 0 or self.has_preempted
                request = self.next_to_start() if has_share and not arrived_only else None
                if request is None or not self._allocate(request):
                    return
                self._waiting.discard(request)
                if request.hands_over and not request.granted:
                    self.holds.add(request)
            request.stamp(RequestEvent.SCHEDULED, now)
            self._run(request, plan)

    def _decode_on(self, plan: StepPlan, now: float) -> None:
        """The next tokens of finished prompts whose receivers are full; only where there is no prompt to run."""
        for request in self.holds.to_decode_on(now):
            if plan.budget == 0 or len(self._running) == self._max_num_seqs:
                return
            self.holds.resumed(request)
            self._run(request, plan)

    def _run(self, request: Request, plan: StepPlan) -> None:
        """From now on it is part of steps, of this one if it gets a share."""
        request.status = RequestStatus.RUNNING
        self._running.append(request)
        if share := plan.share(request):
            plan.add(request, share)

    def _allocate(self, request: Request) -> bool:
        """Blocks for all known tokens and one more. One whose blocks are promised may have those of holds."""
        while True:
            # The last token that is to be computed always is: without it there are no logits to sample from.
            num_tokens = 0 if request.wants_prompt_logprobs else request.num_tokens - request.refills - 1
            hits = self.kv.find_cached(request, num_tokens)
            if self.kv.allocate(request, request.num_tokens + 1, hits):
                break
            if not request.granted or not self.holds.unpin_oldest():
                return False
        request.num_computed_tokens = len(hits) * self.kv.block_size
        if RequestEvent.SCHEDULED not in request.events:
            request.num_cached_tokens = request.num_computed_tokens
        self.counters.prompt_tokens_cached += self._count_prompt(request)
        return True

    def _fly(self, scheduled: Mapping[Request, int]) -> SchedulerOutput:
        """Puts a step in flight that computes so many tokens of each request."""
        output = self._builder.build(scheduled, queued=bool(self._steps))
        for request, num_tokens in scheduled.items():
            if num_tokens == request.num_remaining and not request.refills:
                request.num_output_placeholders += 1
            request.num_tokens_in_flight += num_tokens
        self._steps.append(_StepInFlight(output, list(scheduled), []))
        self.counters.steps += 1
        return output

    # ---- after a step --------------------------------------------------------------------------------------------

    def _retire(self, scheduler_output: SchedulerOutput) -> list[Request]:
        """Ends the oldest step in flight; returns those of its requests that still live."""
        step = self._steps.popleft()
        assert scheduler_output is step.output, "not the oldest step in flight"
        self._must_drain = self._must_drain and bool(self._steps)
        for blocks in step.freed:
            self.kv.pool.free(blocks)
        return [request for request in step.requests if request.status is not RequestStatus.FINISHED]

    def _advance(
        self,
        request: Request,
        num_scheduled: int,
        sampled: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        now: float,
    ) -> StepResult:
        start = request.num_computed_tokens
        request.num_computed_tokens = end = start + num_scheduled
        request.num_tokens_in_flight -= num_scheduled
        if start < request.num_known_before:
            num_again = min(request.num_known_before, end) - start
            request.num_recomputed += num_again
            self.counters.recomputed_tokens += num_again
        request.num_known_before = max(request.num_known_before, end)
        if request.num_counted_prompt_tokens < request.num_prompt_tokens:
            self.counters.prompt_tokens_computed += self._count_prompt(request)
        self.kv.cache_computed(request)

        position = request.num_output_tokens
        assert bool(sampled) == (end == request.num_tokens), f"{request.request_id}: a token too many or too few"
        finish: Finished | None = None
        if sampled:
            request.num_output_placeholders -= 1
            request.stamp(RequestEvent.FIRST_TOKEN, now)
        for token_id in sampled:
            request.output_token_ids.append(token_id)
            finish = end_of_output(request, self._end_token_ids, self.max_model_len)
            if finish is not None:
                break
        new_token_ids = request.output_token_ids[position:]
        self.counters.generated_tokens += len(new_token_ids)
        refilled = request.refills and end == request.num_tokens - 1
        held = request.hands_over and (bool(new_token_ids) or refilled) and finish is None
        if finish is not None:
            self.finish(request.request_id, now, finish.reason)
        elif held:
            self._hold(request, now)
        return StepResult(
            request=request,
            position=position,
            new_token_ids=new_token_ids,
            logprobs=None if logprobs is None else list(logprobs[: len(new_token_ids)]),
            finish=finish,
            held=held,
            num_computed_tokens=request.num_computed_tokens,
        )

    def _hold(self, request: Request, now: float) -> None:
        self._running.remove(request)
        self._builder.forget(request.request_id)
        request.refills = False
        request.status = RequestStatus.HELD
        request.stamp(RequestEvent.HELD, now)

    # ---- small things --------------------------------------------------------------------------------------------

    def _arrive(self, request: Request, status: RequestStatus, now: float) -> None:
        assert request.request_id not in self._requests, f"{request.request_id} exists"
        request.status = status
        request.stamp(RequestEvent.ARRIVED, now)
        self._requests[request.request_id] = request

    def _take_over(self, request: Request, num_computed_tokens: int) -> None:
        """Counts and names what arrived. A request's own prefix hits are valid whatever arrived."""
        request.num_computed_tokens = request.num_cached_tokens
        self.counters.prompt_tokens_cached += self._count_prompt(request)
        request.num_computed_tokens = max(request.num_cached_tokens, num_computed_tokens)
        self.counters.prompt_tokens_transferred += self._count_prompt(request)
        self.kv.cache_computed(request)

    def _count_prompt(self, request: Request) -> int:
        """Prompt tokens that are computed now and have not been counted before; counts them."""
        before = request.num_counted_prompt_tokens
        request.num_counted_prompt_tokens = max(before, min(request.num_computed_tokens, request.num_prompt_tokens))
        return request.num_counted_prompt_tokens - before

    def _end(self, request: Request, outcome: Outcome) -> None:
        del self._requests[request.request_id]
        self.holds.discard(request)
        self._waiting.discard(request)
        if request in self._running:
            self._running.remove(request)
        last_step = next((step for step in reversed(self._steps) if request in step.requests), None)
        if last_step is None:
            self.kv.free(request.request_id)
        else:
            # The device may still write to its blocks.
            last_step.freed.append(self.kv.detach(request.request_id))
        self._builder.forget(request.request_id)
        request.status = RequestStatus.FINISHED
        self.counters.count_end(outcome)
