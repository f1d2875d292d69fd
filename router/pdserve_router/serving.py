"""One generation request from its body to the end of its answer.

The answer's status is decided when the first token (or the end) is in: a request that fails before that gets an HTTP
error, streaming or not; one that fails later gets an error event and the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec.structs import replace

from pdserve_router.errors import NotReady, RequestTimeout, RouterDraining, RouterError
from pdserve_router.generation import Choice, Generation, PromptRun, proof_of
from pdserve_router.http_errors import http_answer
from pdserve_router.output_processor import OutputProcessor
from pdserve_router.prompt_scores import text_offsets
from pdserve_router.request_body import read_body
from pdserve_router.responses import Answer, ChatFormat, CompletionFormat
from pdserve_router.responses_api import ResponsesAnswer
from pdserve_router.trace import RequestTrace
from pdserve_router.validate import (
    check_num_prompt_tokens,
    check_token_ids,
    parse_chat,
    parse_completion,
    parse_responses,
    sampling_params,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve_router.dispatcher import Attempt, Dispatcher
    from pdserve_router.generation import Form
    from pdserve_router.metrics import RouterMetrics
    from pdserve_router.parsers import ParserChoice
    from pdserve_router.registry import NodeRegistry, ServedModel
    from pdserve_router.validate import Endpoint, GenerationRequest, Prompt

REQUEST_ID = web.RequestKey("request_id", str)
_LAST_WORDS_S = 1.0
_LEAST_TIMEOUT_S = 0.001
_CHAT, _COMPLETION = ChatFormat(), CompletionFormat()
_PARSE: dict[Endpoint, Callable[[bytes], GenerationRequest]] = {
    "chat": parse_chat,
    "completion": parse_completion,
    "responses": parse_responses,
}


class Serving:
    """The generation endpoints.

    Args:
        timeout_s: no request takes longer.
        parsers: how answers are taken apart.
    """

    def __init__(
        self,
        registry: NodeRegistry,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        *,
        timeout_s: float,
        parsers: ParserChoice,
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._parsers = parsers
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        return await self._serve(http, "chat")

    async def completion(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        return await self._serve(http, "completion")

    async def responses(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses"""
        return await self._serve(http, "responses")

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; False if some had to be ended when time was over."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self.end_all()
            return False
        return True

    def end_all(self) -> None:
        """Refuse new requests and end the running ones now, with an error."""
        self.draining = True
        self._dispatcher.fail_all(RouterDraining())

    async def _serve(self, http: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        trace = RequestTrace(endpoint, http[REQUEST_ID], self._metrics)
        self._running += 1
        self._idle.clear()
        self._metrics.running.inc()
        try:
            return await self._answer(http, endpoint, trace)
        except RouterError as error:
            trace.status, trace.end = http_answer(error).status, error.code or "error"
            raise
        except web.HTTPException as error:
            trace.status, trace.end = error.status, "error"
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            trace.status, trace.end = 499, "client_gone"
            raise
        finally:
            self._metrics.running.dec()
            self._running -= 1
            if self._running == 0:
                self._idle.set()
            trace.on_end()

    async def _answer(self, http: web.Request, endpoint: Endpoint, trace: RequestTrace) -> web.StreamResponse:
        if self.draining:
            raise RouterDraining
        deadline = asyncio.timeout(self._timeout_s)
        run: Generation | None = None
        try:
            async with deadline:
                request = _PARSE[endpoint](await read_body(http))
                served = self._registry.resolve(request.model)
                run = await self._prepare(request, served, trace)
                if request.stream:
                    return await run.stream(http)
                return await run.plain()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            return await self._failed(http, run, RequestTimeout(self._timeout_s), error)
        except RouterError as error:
            return await self._failed(http, run, error, None)
        finally:
            for choice in run.choices if run is not None else ():
                choice.close()
                if choice.attempt is not None:
                    trace.proofs.append((proof_of(choice.attempt), len(choice.prompt.token_ids)))

    async def _prepare(self, request: GenerationRequest, served: ServedModel, trace: RequestTrace) -> Generation:
        """Everything that can be refused is refused here; no node has heard of the request yet."""
        prompts = [await self._prompt(request, prompt, served) for prompt in request.prompts]
        trace.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        check_num_prompt_tokens(request, trace.num_prompt_tokens)
        parsers = self._parsers.of(request, served.text)
        if request.grammar is not None:
            await served.text.check_grammar(request.grammar, request.grammar_param)
            for prompt in prompts:
                grammar = parsers.grammar(request.grammar, prompt.token_ids, calls=request.must_call)
                await served.text.check_grammar(grammar, request.grammar_param)
                prompt.sampling = replace(prompt.sampling, grammar=grammar)

        def served_now() -> ServedModel:
            """With the nodes that are there now: others, perhaps, than when the request came."""
            now = self._registry.resolve(served.name)
            if now.model_id != served.model_id:
                raise NotReady(f"Another model is served as '{served.name}' since the request came")
            return now

        def start(prompt: PromptRun, sample: int, beside: Attempt | None) -> Attempt:
            return self._dispatcher.start(
                served_now(),
                prompt.token_ids,
                # Those of the first choice's attempt are the same for all.
                prompt.sampling if beside is None else replace(prompt.sampling, prompt_logprobs=None),
                timeout_s=self._timeout_s,
                client_id=trace.request_id,
                cache_salt=request.body.cache_salt or "",
                priority=request.body.priority or 0,
                choice=sample,
                beside=beside,
            )

        def restart(choice: Choice, failed: Attempt, error: RouterError) -> Attempt:
            try:
                now = served_now()
            except NotReady:
                raise error from None
            is_first = choice.sample == 0 and not choice.seen
            sampling = choice.prompt.sampling
            attempt = self._dispatcher.restart(
                failed,
                error,
                now,
                choice.prompt.token_ids,
                sampling if is_first else replace(sampling, prompt_logprobs=None),
                seen=choice.seen,
                timeout_s=max(self._timeout_s - (time.monotonic() - trace.arrived), _LEAST_TIMEOUT_S),
                client_id=trace.request_id,
                cache_salt=request.body.cache_salt or "",
                priority=request.body.priority or 0,
                choice=choice.sample,
            )
            if not is_first:
                # They are all here: no token is shown before.
                attempt.life.prompt_logprobs = failed.life.prompt_logprobs
            return attempt

        choices, close = list[Choice](), self._dispatcher.close
        for prompt in prompts:
            leader: Choice | None = None
            for sample in range(request.n):
                processor = OutputProcessor(
                    served.text.tokenizer,
                    stop=request.stop,
                    min_tokens=prompt.sampling.min_tokens,
                    with_logprobs=request.logprobs is not None,
                    include_stop=request.include_stop,
                    skip_special_tokens=request.skip_special_tokens and not parsers.need_special_tokens,
                    prompt_token_ids=prompt.token_ids,
                    text_offset=len(prompt.echo),
                )
                parser = parsers.new(prompt.token_ids)
                choice = Choice(len(choices), sample, prompt, processor, parser, start, restart, close, leader, trace)
                leader = leader or choice
                choices.append(choice)
        return Generation(request, _form(request, served), choices, trace)

    async def _prompt(self, request: GenerationRequest, prompt: Prompt, served: ServedModel) -> PromptRun:
        param = request.prompt_param
        if len(request.prompts) > 1:
            param = f"{param}[{request.prompts.index(prompt)}]"
        tokenizer = served.text.tokenizer
        ids = await served.text.prompt_ids(prompt, served.limit, param)
        if isinstance(prompt, list):
            check_token_ids(ids, served.vocab_size, param)
        sampling = sampling_params(
            request,
            num_prompt_tokens=len(ids),
            limit=served.limit,
            vocab_size=served.vocab_size,
            defaults=tokenizer.generation_defaults,
        )
        run = PromptRun(token_ids=ids, sampling=sampling)
        if request.echo:
            is_text = isinstance(prompt, str)
            run.echo = prompt if isinstance(prompt, str) else tokenizer.decode(ids, request.skip_special_tokens)
            if request.logprobs is not None:
                skip = request.skip_special_tokens and not is_text
                run.echo_offsets = text_offsets(tokenizer, ids, run.echo, skip_special_tokens=skip)
        return run

    async def _failed(
        self, http: web.Request, run: Generation | None, error: RouterError, cause: BaseException | None
    ) -> web.StreamResponse:
        """Raise ``error`` where there can still be an HTTP error; else say it in the stream."""
        events = run.events if run is not None else None
        if run is None or events is None or events.response is None:
            raise error from cause
        run.trace.status, run.trace.end = events.response.status, error.code or "error"
        # The client may be what is stuck: its connection is closed when it does not take these last words in time.
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                events.put(run.form.failed(error))
                return await events.end()
        except (TimeoutError, ConnectionResetError):
            if http.transport is not None:
                http.transport.abort()
        return events.response


def _form(request: GenerationRequest, served: ServedModel) -> Form:
    unique = secrets.token_hex(12)
    if request.original is not None:
        return ResponsesAnswer(request.original, served.name, unique)
    return Answer(
        _CHAT if request.endpoint == "chat" else _COMPLETION,
        served.name,
        unique,
        served.text.tokenizer,
        request.logprobs,
        num_prompt_top=request.body.prompt_logprobs,
        include_usage=request.include_usage,
    )
