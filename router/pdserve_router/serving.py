"""One generation request from its body to the end of its answer.

The answer's status is decided when the first token (or the end) is in: a request that fails before that gets an HTTP
error, streaming or not; one that fails later gets an error event and the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve_router.errors import NodeFailed, RequestTimeout, RouterDraining, RouterError
from pdserve_router.http_errors import error_body, http_answer
from pdserve_router.lifecycle import Half
from pdserve_router.output_processor import OutputProcessor
from pdserve_router.proof import build_proof
from pdserve_router.responses import DONE, Answer, ChatFormat, CompletionFormat, Usage, usage_field
from pdserve_router.trace import RequestTrace
from pdserve_router.validate import check_token_ids, parse_chat, parse_completion, sampling_params

if TYPE_CHECKING:
    from pdserve_protocol.outputs import FinishReason

    from pdserve_router.dispatcher import Attempt, Dispatcher
    from pdserve_router.lifecycle import Progress
    from pdserve_router.metrics import RouterMetrics
    from pdserve_router.output_processor import Delta, TokenEntry
    from pdserve_router.proof import Proof
    from pdserve_router.registry import NodeRegistry, ServedModel
    from pdserve_router.validate import GenerationRequest

REQUEST_ID = web.RequestKey("request_id", str)
_LAST_WORDS_S = 1.0
_LATE_PROOF_S = 0.1
_MAX_CHUNKS_A_WRITE = 64
_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_CHAT, _COMPLETION = ChatFormat(), CompletionFormat()


class Serving:
    """The two generation endpoints.

    Args:
        timeout_s: no request takes longer.
    """

    def __init__(
        self, registry: NodeRegistry, dispatcher: Dispatcher, metrics: RouterMetrics, *, timeout_s: float
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._timeout_s = timeout_s
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

    async def _serve(self, http: web.Request, endpoint: str) -> web.StreamResponse:
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

    async def _answer(self, http: web.Request, endpoint: str, trace: RequestTrace) -> web.StreamResponse:
        if self.draining:
            raise RouterDraining
        deadline = asyncio.timeout(self._timeout_s)
        run: _Run | None = None
        try:
            async with deadline:
                data = await http.read()
                request = parse_chat(data) if endpoint == "chat" else parse_completion(data)
                served = self._registry.resolve(request.model)
                run = await self._start(request, served, trace)
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
            if run is not None:
                self._dispatcher.close(run.attempt)
                trace.proof = run.proof()

    async def _start(self, request: GenerationRequest, served: ServedModel, trace: RequestTrace) -> _Run:
        prompt_ids = await served.text.prompt_ids(request.prompt, served.limit)
        if isinstance(request.prompt[0], int):
            check_token_ids(prompt_ids, served.vocab_size)
        trace.num_prompt_tokens = len(prompt_ids)
        tokenizer = served.text.tokenizer
        sampling = sampling_params(
            request,
            num_prompt_tokens=len(prompt_ids),
            limit=served.limit,
            vocab_size=served.vocab_size,
            defaults=tokenizer.generation_defaults,
        )
        processor = OutputProcessor(
            tokenizer,
            stop=request.stop,
            min_tokens=sampling.min_tokens,
            with_logprobs=request.logprobs is not None,
            prompt_token_ids=prompt_ids,
        )
        form = _CHAT if request.chat else _COMPLETION
        answer = Answer(form, served.name, secrets.token_hex(12), tokenizer, request.logprobs)
        attempt = self._dispatcher.start(
            served,
            prompt_ids,
            sampling,
            timeout_s=self._timeout_s,
            client_id=trace.request_id,
            cache_salt=request.body.cache_salt or "",
        )
        return _Run(request, attempt, processor, answer, trace)

    async def _failed(
        self, http: web.Request, run: _Run | None, error: RouterError, cause: BaseException | None
    ) -> web.StreamResponse:
        """Raise ``error`` where there can still be an HTTP error; else say it in the stream."""
        if run is None or run.response is None:
            raise error from cause
        run.trace.end = error.code or "error"
        # The client may be what is stuck: its connection is closed when it does not take these last words in time.
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await run.response.write(b"data: " + error_body(error) + b"\n\n")
                await run.response.write_eof()
        except (TimeoutError, ConnectionResetError):
            if http.transport is not None:
                http.transport.abort()
        return run.response


class _Run:
    """A started request and its answer in the making.

    Attributes:
        response: the stream, once its headers are on their way.
    """

    def __init__(
        self,
        request: GenerationRequest,
        attempt: Attempt,
        processor: OutputProcessor,
        answer: Answer,
        trace: RequestTrace,
    ) -> None:
        self._request = request
        self.attempt = attempt
        self._processor = processor
        self._answer = answer
        self.trace = trace
        self.response: web.StreamResponse | None = None

    def proof(self) -> Proof:
        attempt = self.attempt
        return build_proof(attempt.life, attempt.mode, attempt.node_name(Half.PREFILL), attempt.node_name(Half.DECODE))

    async def plain(self) -> web.Response:
        texts: list[str] = []
        entries: list[TokenEntry] = []
        while True:
            progress = self.attempt.poll()
            if progress is None:
                await self.attempt.wait()
                continue
            delta = self._process(progress)
            texts.append(delta.text)
            entries.extend(delta.entries)
            if delta.reason is not None:
                await self._hear_both()
                self._ended(delta.reason)
                body = self._answer.plain("".join(texts), entries, delta.reason, self._usage(), self.proof())
                return web.Response(body=body, content_type="application/json")

    async def stream(self, http: web.Request) -> web.StreamResponse:
        answer, request = self._answer, self._request
        null_usage = usage_field(None) if request.include_usage else b""
        held: list[bytes] = []
        while True:
            progress = self.attempt.poll()
            if progress is None or len(held) >= _MAX_CHUNKS_A_WRITE:
                await self._write(held)
            if progress is None:
                await self.attempt.wait()
                continue
            delta = self._process(progress)
            usage = usage_field(self._usage()) if request.continuous_usage else null_usage
            if self.response is None:
                self.response = web.StreamResponse(headers=_SSE_HEADERS)
                await self.response.prepare(http)
                self.trace.status = self.response.status
                held.append(answer.first(usage))
            if delta.text or delta.entries:
                held.append(answer.token(delta.text, delta.entries, usage))
            if delta.reason is not None:
                await self._hear_both()
                held.append(answer.last(delta.reason, usage, self.proof()))
                if request.include_usage:
                    held.append(answer.usage(self._usage()))
                held.append(DONE)
                await self._write(held)
                await self.response.write_eof()
                self._ended(delta.reason)
                return self.response

    async def _hear_both(self) -> None:
        """Wait a little for the prefill node's proof: it comes on another connection than the decode node's end."""
        attempt = self.attempt
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LATE_PROOF_S):
                while Half.PREFILL in attempt.life.open_halves and Half.PREFILL not in attempt.life.prefill_proofs:
                    if attempt.poll() is None:
                        await attempt.wait()

    async def _write(self, held: list[bytes]) -> None:
        """Hand over what is held, and wait while the client is behind. A large backlog leaves others their turn."""
        if not held or self.response is None:
            return
        chunk = held[0] if len(held) == 1 else b"".join(held)
        behind = len(held) >= _MAX_CHUNKS_A_WRITE
        held.clear()
        await self.response.write(chunk)
        if behind:
            await asyncio.sleep(0)

    def _process(self, progress: Progress) -> Delta:
        if self._request.logprobs is not None and len(progress.logprobs) != len(progress.token_ids):
            nodes = " and ".join(node.name for node in self.attempt.nodes.values())
            raise NodeFailed(nodes, "internal", "tokens came without their log probabilities")
        processor = self._processor
        before = processor.num_tokens
        delta = processor.process(progress.token_ids, progress.logprobs, progress.finished)
        if delta.stopped:
            self.attempt.life.stop()
        self.trace.on_tokens(processor.num_tokens - before)
        return delta

    def _ended(self, reason: FinishReason) -> None:
        self.trace.status, self.trace.end = 200, reason

    def _usage(self) -> Usage:
        cached = self.proof().cached_tokens
        first = cached.decode if self.attempt.mode == "aggregated" else cached.prefill
        return Usage(
            num_prompt_tokens=self.trace.num_prompt_tokens,
            num_output_tokens=self._processor.num_tokens,
            num_cached_tokens=first or 0,
        )
