"""A request at work: its choices, each an attempt of its own, and the one answer that they make.

The choices of one prompt share its computation and its transfer: the first is sent alone, and the others go on from its
prompt when its second token is in, which only a node that has the prompt can make. Knows nothing of the shapes of
answers, which ``form`` builds.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from aiohttp import web
from pdserve_text.pieces import Content

from pdserve_router.errors import NodeFailed, RouterError
from pdserve_router.event_stream import EventStream
from pdserve_router.lifecycle import Half
from pdserve_router.outcome import Outcome
from pdserve_router.prompt_scores import echo_entries
from pdserve_router.proof import build_proof
from pdserve_router.responses import Usage, usage_field

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from pdserve_protocol.outputs import TokenLogprobs
    from pdserve_protocol.sampling import SamplingParams
    from pdserve_text.output_parser import OutputParser
    from pdserve_text.pieces import Piece

    from pdserve_router.dispatcher import Attempt
    from pdserve_router.lifecycle import Progress
    from pdserve_router.openai_answers import AnswerReason
    from pdserve_router.output_processor import Delta, OutputProcessor, TokenEntry
    from pdserve_router.proof import Proof
    from pdserve_router.trace import RequestTrace
    from pdserve_router.validate import GenerationRequest

_LATE_PROOF_S = 0.1
_MANY_LOGPROBS = 1024
_MAX_CHUNKS_A_TURN = 64


class ChoiceChunks(Protocol):
    """The stream of one choice. ``usage`` is a member of a chunk, or empty."""

    def first(self, usage: bytes) -> bytes: ...

    def text(self, text: str, entries: Sequence[TokenEntry], usage: bytes) -> bytes: ...

    def pieces(self, pieces: Sequence[Piece], entries: Sequence[TokenEntry], usage: bytes) -> bytes: ...

    def last(self, reason: AnswerReason, usage: bytes, proof: Proof) -> bytes: ...


class Form(Protocol):
    """The shapes of one endpoint's answer."""

    def plain(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes: ...

    def chunks(self, index: int) -> ChoiceChunks: ...

    def end(self, usage: Usage) -> bytes: ...

    def failed(self, error: RouterError) -> bytes: ...


@dataclass(kw_only=True)
class PromptRun:
    """One prompt of a request and what its choices share.

    Attributes:
        echo: text of the prompt, where the answer repeats it.
        echo_offsets: where in that each token begins, if log probabilities go with it.
        begun: the first choice is past its first token, so that the prompt is in its nodes' caches.
    """

    token_ids: list[int]
    sampling: SamplingParams
    echo: str = ""
    echo_offsets: list[int] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)


class Choice:
    """One choice: an attempt and the text that comes of it.

    Args:
        sample: number among the choices of its prompt, which is a part of its random numbers.
        start: sends the attempt, to the nodes of the one given where there is one.
        restart: sends another one in the place of one that failed, or raises its error.
        close: forgets an attempt, which its nodes need not go on with. Idempotent.
        leader: the first choice of the same prompt.
        trace: is told of the tokens.

    Attributes:
        seen: output tokens so far.
    """

    def __init__(
        self,
        index: int,
        sample: int,
        prompt: PromptRun,
        processor: OutputProcessor,
        parser: OutputParser | None,
        start: Callable[[PromptRun, int, Attempt | None], Attempt],
        restart: Callable[[Choice, Attempt, RouterError], Attempt],
        close: Callable[[Attempt], None],
        leader: Choice | None,
        trace: RequestTrace,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.attempt: Attempt | None = None
        self.processor = processor
        self.sample = sample
        self.seen: list[int] = []
        self._parser = parser
        self._start = start
        self._restart = restart
        self._close = close
        self._leader = leader
        self._trace = trace
        self._last_tokens: float | None = None

    async def begin(self) -> Attempt:
        """Send the attempt: all choices of a prompt go on from what is computed, and handed over, for the first."""
        leader = self._leader
        if leader is None:
            self.attempt = self._start(self.prompt, self.sample, None)
        else:
            await self.prompt.begun.wait()
            self.attempt = self._start(self.prompt, self.sample, leader.attempt)
        return self.attempt

    def go_on_elsewhere(self, error: RouterError) -> Attempt:
        """Another attempt, after the tokens that are here, in the place of the one that ended with ``error``.

        Raises:
            RouterError: ``error``, where there can be none.
        """
        if self.attempt is None:
            raise error
        self.attempt = self._restart(self, self.attempt, error)
        return self.attempt

    def close(self) -> None:
        """There is nothing more to come. Idempotent."""
        if self.attempt is not None:
            self._close(self.attempt)

    def process(self, progress: Progress) -> Delta:
        """Text of the next tokens."""
        processor, attempt, before = self.processor, self.attempt, self.processor.num_tokens
        if processor.with_logprobs and len(progress.logprobs) != len(progress.token_ids) and attempt is not None:
            nodes = " and ".join(node.name for node in attempt.nodes.values())
            raise NodeFailed(nodes, "internal", "tokens came without their log probabilities")
        self.seen += progress.token_ids
        delta = processor.process(progress.token_ids, progress.logprobs, progress.finished)
        if delta.stopped and attempt is not None:
            attempt.life.stop()
        if before <= 1 < processor.num_tokens or delta.reason is not None:
            self.prompt.begun.set()
        self._last_tokens = self._trace.on_tokens(processor.num_tokens - before, self._last_tokens)
        return delta

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Of the prompt's tokens but the first, as soon as there is text of any choice; empty where not asked for."""
        attempt = (self._leader or self).attempt
        return [] if attempt is None else attempt.life.prompt_logprobs

    def echo_entries(self) -> list[TokenEntry]:
        """Log probabilities of an echoed prompt; none where they were not asked for."""
        prompt = self.prompt
        return echo_entries(prompt.token_ids, self.prompt_logprobs, prompt.echo_offsets) if prompt.echo_offsets else []

    def pieces(self, delta: Delta) -> list[Piece]:
        """What the text consists of."""
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        return self._parser.push(delta.text, last=delta.reason is not None)

    @property
    def is_parsed(self) -> bool:
        return self._parser is not None

    def reason(self, delta: Delta) -> AnswerReason:
        """Why the choice ended, as the client is told."""
        called = self._parser is not None and self._parser.called
        return "tool_calls" if called and delta.reason == "stop" else delta.reason or "stop"

    def usage(self) -> Usage:
        """Of this choice alone."""
        attempt, cached = self.attempt, None
        if attempt is not None:
            tokens = proof_of(attempt).cached_tokens
            cached = tokens.decode if attempt.mode == "aggregated" else tokens.prefill
        return Usage(
            num_prompt_tokens=len(self.prompt.token_ids),
            num_output_tokens=self.processor.num_tokens,
            num_cached_tokens=cached or 0,
        )


class Generation:
    """All choices of one request and its answer.

    Attributes:
        form: builds the answer.
        events: where it goes, if it is a stream.
    """

    def __init__(self, request: GenerationRequest, form: Form, choices: list[Choice], trace: RequestTrace) -> None:
        self._request = request
        self.form = form
        self.choices = choices
        self.trace = trace
        self.events: EventStream | None = None

    async def plain(self) -> web.Response:
        """The answer in one piece."""
        outcomes = await _together([self._plain(choice) for choice in self.choices])
        usage = self._usage()
        if any(len(outcome.prompt_logprobs) > _MANY_LOGPROBS for outcome in outcomes):
            # It takes long enough for others to notice.
            body = await asyncio.to_thread(self.form.plain, outcomes, usage)
        else:
            body = self.form.plain(outcomes, usage)
        self._ended(outcomes[0].reason)
        return web.Response(body=body, content_type="application/json")

    async def stream(self, http: web.Request) -> web.StreamResponse:
        """The answer as it comes. It has begun, with status 200, when the first token of any choice is in."""
        self.events = events = EventStream(http)
        reasons = await _together([self._stream(choice, events) for choice in self.choices])
        events.put(self.form.end(self._usage()))
        response = await events.end()
        self._ended(reasons[0])
        return response

    async def _plain(self, choice: Choice) -> Outcome:
        outcome = Outcome(choice.index, [Content(choice.prompt.echo)] if choice.prompt.echo else [])

        def show(delta: Delta) -> None:
            outcome.pieces.extend(choice.pieces(delta))
            outcome.entries.extend(delta.entries)

        end, attempt = await self._until_end(choice, show)
        outcome.reason, outcome.proof = choice.reason(end), proof_of(attempt)
        outcome.entries[:0] = choice.echo_entries()
        outcome.prompt_logprobs = choice.prompt_logprobs
        return outcome

    async def _stream(self, choice: Choice, events: EventStream) -> AnswerReason:
        request, chunks = self._request, self.form.chunks(choice.index)
        usage = usage_field(None) if request.include_usage else b""
        continuous_usage, is_parsed, is_first = request.continuous_usage, choice.is_parsed, True

        def show(delta: Delta) -> None:
            nonlocal usage, is_first
            if continuous_usage:
                usage = usage_field(choice.usage())
            if is_first:
                is_first = False
                events.put(chunks.first(usage))
                if choice.prompt.echo or choice.prompt.echo_offsets:
                    events.put(chunks.text(choice.prompt.echo, choice.echo_entries(), usage))
            if is_parsed:
                events.put(chunks.pieces(choice.pieces(delta), delta.entries, usage))
            elif delta.text or delta.entries:
                events.put(chunks.text(delta.text, delta.entries, usage))

        end, attempt = await self._until_end(choice, show, events)
        reason = choice.reason(end)
        events.put(chunks.last(reason, usage, proof_of(attempt)))
        events.flush()
        return reason

    async def _until_end(
        self, choice: Choice, show: Callable[[Delta], None], events: EventStream | None = None
    ) -> tuple[Delta, Attempt]:
        """The last text of a choice, and the attempt that came to it, of which its nodes are free then."""
        attempt = await choice.begin()
        while True:
            try:
                end = await _Listening(attempt, choice, show, events).until_end()
            except RouterError as error:
                attempt = choice.go_on_elsewhere(error)
            else:
                choice.close()
                return end, attempt

    def _usage(self) -> Usage:
        """Of the whole request: each prompt counts once, whatever the number of its choices."""
        firsts = [choice.usage() for choice in self.choices if choice.index % self._request.n == 0]
        return Usage(
            num_prompt_tokens=sum(usage.num_prompt_tokens for usage in firsts),
            num_output_tokens=sum(choice.processor.num_tokens for choice in self.choices),
            num_cached_tokens=sum(usage.num_cached_tokens for usage in firsts),
        )

    def _ended(self, reason: AnswerReason) -> None:
        self.trace.status, self.trace.end = 200, reason


class _Listening:
    """Takes what the nodes say of one choice, as it comes: a Listener.

    Args:
        choice: makes text of tokens.
        show: gets every text, the last one as well.
        events: where ``show`` puts it, if it is streamed.
    """

    def __init__(
        self,
        attempt: Attempt,
        choice: Choice,
        show: Callable[[Delta], None],
        events: EventStream | None = None,
    ) -> None:
        self._attempt = attempt
        self._choice = choice
        self._show = show
        self._events = events
        self._end: Delta | None = None

    async def until_end(self) -> Delta:
        """The last text, when it has been shown."""
        while self._end is None:
            if not self.take():
                self.flush()
                await self._attempt.wait(self)
            elif self._events is not None:
                await self._events.catch_up()
            else:
                # A large backlog leaves others their turn.
                await asyncio.sleep(0)
        await _hear_both(self._attempt)
        return self._end

    def take(self) -> bool:
        attempt = self._attempt
        for _ in range(_MAX_CHUNKS_A_TURN):
            progress = attempt.poll()
            if progress is None:
                return self._events is not None and self._events.needs_task()
            delta = self._choice.process(progress)
            self._show(delta)
            if delta.reason is not None:
                self._end = delta
                break
        return True

    def flush(self) -> None:
        if self._events is not None:
            self._events.flush()


def proof_of(attempt: Attempt) -> Proof:
    """What the nodes have said so far that they did."""
    prefill, decode = attempt.node_name(Half.PREFILL), attempt.node_name(Half.DECODE)
    return build_proof(attempt.life, attempt.mode, prefill, decode, attempt.num_retries, attempt.exact, attempt.reason)


async def _together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All results, or the first error; nothing goes on alone."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _hear_both(attempt: Attempt) -> None:
    """Wait a little for the prefill node's proof: it comes on another connection than the decode node's end."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LATE_PROOF_S):
            while True:
                attempt.poll()
                if Half.PREFILL not in attempt.life.open_halves or Half.PREFILL in attempt.life.prefill_proofs:
                    return
                await attempt.wait()
