"""LLM: the offline API. Prompts in, texts out, in this process, without a server.

Owns the driving of an EngineCore from one caller's thread. What a request may ask is the engine's matter.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pdserve_protocol.outputs import Failed, Finished
from pdserve_protocol.requests import AddRequest
from pdserve_protocol.sampling import SamplingParams
from pdserve_text.chat_template import ChatTemplate
from pdserve_text.files import load_tokenizer_files
from pdserve_text.tokenizer import Tokenizer
from tqdm import tqdm

from pdserve_engine.config import CacheConfig, CacheDType, DType, EngineConfig, ModelConfig, SchedulerConfig
from pdserve_engine.errors import GenerationFailed
from pdserve_engine.request import RequestEvent
from pdserve_engine.weights import resolve_model
from pdserve_engine.wiring import build_engine

if TYPE_CHECKING:
    from types import TracebackType

    from pdserve_kernels.interface import Quantization
    from pdserve_protocol.outputs import FinishReason, TokenLogprobs

    from pdserve_engine.device import Device
    from pdserve_engine.request import Request

__all__ = ["LLM", "Generation", "build_engine"]

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one prompt.

    Attributes:
        prompt: as it was given, or rendered from messages; None where token ids were given.
        text: without the token that ended it.
        token_ids: all that were generated, the one that ended it among them.
        logprobs: one entry per token, where asked for.
        num_cached_tokens: prompt tokens that were not computed again.
        ttft_s: seconds from the call to the first token, the wait for others included.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    num_cached_tokens: int
    ttft_s: float


@dataclass(slots=True)
class _Pending:
    prompt: str | None
    request: Request
    logprobs: list[TokenLogprobs]
    finish: Finished | None = None


class LLM:
    """A model, ready to generate. Not to be used from several threads at once.

    Args:
        model: a Hugging Face folder, a GGUF file, or the name of the demo model.
        kv_cache_dtype: int8 and fp8 hold nearly twice the tokens and lose digits; auto caches in ``dtype``.
        kv_cache_memory: bytes; by default a quarter of free memory, 4 GiB at most.
        threads: compute threads; by default one per core.
        quantization: int8 keeps the weights of the layers in 8 bits (CPUs).
        device: auto is the GPU where there is one.
        enforce_eager: no CUDA graphs of decode steps.

    Raises:
        ModelError, WeightsError, DeviceSetupError, TextError: the model cannot be used.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: DType = "bfloat16",
        quantization: Quantization | None = None,
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_dtype: CacheDType = "auto",
        kv_cache_memory: int | None = None,
        enable_prefix_caching: bool = True,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        threads: int | None = None,
        device: Device = "auto",
        enforce_eager: bool = False,
    ) -> None:
        folder = resolve_model(model)
        files = load_tokenizer_files(folder)
        self.tokenizer = Tokenizer.from_files(files)
        self._chat_template = ChatTemplate.from_files(files)
        config = EngineConfig(
            model=ModelConfig(path=folder, dtype=dtype, quantization=quantization, max_model_len=max_model_len),
            cache=CacheConfig(
                block_size=block_size,
                dtype=kv_cache_dtype,
                memory_bytes=kv_cache_memory,
                enable_prefix_caching=enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            num_threads=threads,
            device=device,
            enforce_eager=enforce_eager,
        )
        self.core, self._worker = build_engine(config)
        self._numbers = itertools.count()

    def default_sampling_params(self, **fields: Any) -> SamplingParams:
        """What the model's authors recommend, with a fresh seed; ``fields`` are set beside that."""
        defaults: dict[str, Any] = dict(self.tokenizer.generation_defaults)
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        return SamplingParams(**{"seed": secrets.randbits(63), **defaults, **fields})

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Generation]:
        """Answers to prompts, in their order: one text, or several texts or lists of token ids.

        Args:
            sampling_params: for all prompts or one for each; by default ``default_sampling_params()``.
            use_tqdm: show progress on stderr.

        Raises:
            RequestRejected: a prompt cannot be taken; nothing is generated then.
            GenerationFailed: the device failed.
            NotUnicode: a text cannot be tokenized.
        """
        texts_or_ids = [prompts] if isinstance(prompts, str) else prompts
        return self._generate([self._encode(prompt) for prompt in texts_or_ids], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_variables: Any,
    ) -> list[Generation]:
        """As ``generate``, with the model's chat template over one conversation or several.

        Raises:
            ChatTemplateError, UnsupportedContent: the messages cannot be rendered.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        rendered = [self._chat_template.render(one, **template_variables) for one in conversations]  # type: ignore[arg-type]
        encoded = [(text, self.tokenizer.encode(text, add_special_tokens=False)) for text in rendered]
        return self._generate(encoded, sampling_params, use_tqdm)

    def close(self) -> None:
        """Waits for the step under way and releases the device. Idempotent."""
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- one call ------------------------------------------------------------------------------------------------

    def _encode(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        return None, list(prompt)

    def _generate(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[Generation]:
        if sampling_params is None:
            # A seed for each: equal prompts are to get different samples.
            each: Sequence[SamplingParams] = [self.default_sampling_params() for _ in prompts]
        elif isinstance(sampling_params, SamplingParams):
            each = [sampling_params] * len(prompts)
        else:
            each = sampling_params
        pending: dict[str, _Pending] = {}
        started_at = time.monotonic()
        try:
            for (prompt, token_ids), sampling in zip(prompts, each, strict=True):
                id = f"offline-{next(self._numbers)}"
                message = AddRequest(id=id, boot_id="", prompt_token_ids=token_ids, sampling=sampling)
                pending[id] = _Pending(prompt, self.core.add_request(message, started_at), [])
            with tqdm(total=len(pending), desc="Generating", unit="prompt", disable=not use_tqdm) as bar:
                self._run(pending, bar)
        finally:
            for id in pending:
                self.core.abort(id, time.monotonic())
            while self.core.step_in_flight:
                self.core.step(time.monotonic)
        return [self._generation(one, started_at) for one in pending.values()]

    def _run(self, pending: Mapping[str, _Pending], bar: tqdm[Any]) -> None:
        num_unfinished, num_tokens = len(pending), 0
        while num_unfinished:
            for result in self.core.step(time.monotonic):
                one = pending.get(result.request.request_id)
                if one is None:
                    continue  # of a call that was interrupted
                num_tokens += len(result.new_token_ids)
                one.logprobs.extend(result.logprobs or [])
                if isinstance(result.finish, Failed):
                    raise GenerationFailed(result.finish.message)
                if result.finish is not None:
                    one.finish = result.finish
                    num_unfinished -= 1
                    bar.set_postfix(tokens=num_tokens, refresh=False)
                    bar.update()

    def _generation(self, one: _Pending, started_at: float) -> Generation:
        assert one.finish is not None
        request = one.request
        token_ids = request.output_token_ids
        shown = token_ids if one.finish.stop_token_id is None else token_ids[:-1]
        return Generation(
            prompt=one.prompt,
            prompt_token_ids=request.prompt_token_ids,
            text=self.tokenizer.decode(shown),
            token_ids=token_ids,
            logprobs=one.logprobs if request.sampling.logprobs is not None else None,
            finish_reason=one.finish.reason,
            num_cached_tokens=request.num_cached_tokens,
            ttft_s=request.events[RequestEvent.FIRST_TOKEN] - started_at,
        )
