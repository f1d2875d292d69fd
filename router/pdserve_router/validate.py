"""From bytes to checked values: every 4xx about a field is raised here, before any node works.

Two steps: ``parse_chat`` / ``parse_completion`` need nothing but the body; ``sampling_params`` needs what only the
model knows (vocabulary, defaults, limits) and the prompt's length.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from pdserve_protocol.sampling import SamplingParams

from pdserve_router.errors import BadRequest, ContextTooLong, NotSupported
from pdserve_router.openai_types import (
    NOT_BUILT,
    Body,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    body_decoder,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_MESSAGES = 2048
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
_SEED_MASK = (1 << 63) - 1
_ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")

_chat_decoder = body_decoder(ChatBody)
_completion_decoder = body_decoder(CompletionBody)

Prompt = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One request, as far as it can be checked without knowing the model.

    Attributes:
        chat: from the chat endpoint; ``prompt`` is then a list of messages.
        max_tokens: None where the client gave none.
        max_tokens_param: the field that ``max_tokens`` came from, for messages.
        logprobs: most probable tokens to report beside the chosen one; None reports nothing.
    """

    chat: bool
    model: str | None
    prompt: Prompt
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    max_tokens_param: str
    stop: tuple[str, ...]
    logprobs: int | None
    body: GenerationBody = field(repr=False)


def parse_chat(data: bytes) -> GenerationRequest:
    """A chat completion request.

    Raises:
        BadRequest: the first fault found, with the field named.
    """
    body = _decode(data, _chat_decoder)
    top = body.top_logprobs
    _check_range("top_logprobs", top, 0, MAX_LOGPROBS)
    if top and not body.logprobs:
        raise BadRequest("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    both_given = body.max_completion_tokens is not None
    return _checked(
        body,
        chat=True,
        prompt=_messages(body.messages),
        max_tokens=body.max_completion_tokens if both_given else body.max_tokens,
        max_tokens_param="max_completion_tokens" if both_given else "max_tokens",
        logprobs=(top or 0) if body.logprobs else None,
    )


def parse_completion(data: bytes) -> GenerationRequest:
    """A text completion request.

    Raises:
        BadRequest: the first fault found, with the field named.
    """
    body = _decode(data, _completion_decoder)
    _check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    return _checked(
        body,
        chat=False,
        prompt=_prompt(body.prompt),
        max_tokens=body.max_tokens,
        max_tokens_param="max_tokens",
        logprobs=body.logprobs,
    )


def sampling_params(
    request: GenerationRequest,
    *,
    num_prompt_tokens: int,
    limit: int,
    vocab_size: int,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    """Sampling parameters with every default filled in, and a seed drawn where the client gave none.

    Args:
        limit: prompt and output tokens that fit the context and the KV cache of every node in question.
        defaults: the model's own generation defaults, by the names of a Hugging Face generation_config.json.

    Raises:
        ContextTooLong: the prompt, or the prompt and an explicit max_tokens, exceed ``limit``.
        BadRequest: a token id outside the vocabulary, or min_tokens above max_tokens.
    """
    body = request.body
    room = limit - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(num_prompt_tokens, None, limit, "messages" if request.chat else "prompt")
    if request.max_tokens is not None and request.max_tokens > room:
        raise ContextTooLong(num_prompt_tokens, request.max_tokens, limit, request.max_tokens_param)
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = room if request.chat else min(DEFAULT_COMPLETION_TOKENS, room)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(f"'min_tokens' is {min_tokens}, more than the {max_tokens} of 'max_tokens'", "min_tokens")

    def pick(value: Any, name: str, otherwise: Any) -> Any:
        if value is not None:
            return value
        default = defaults.get(name)
        return otherwise if default is None else default

    top_k = int(pick(body.top_k, "top_k", 0))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=float(pick(body.temperature, "temperature", 1.0)),
        top_k=max(top_k, 0),
        top_p=float(pick(body.top_p, "top_p", 1.0)),
        min_p=float(pick(body.min_p, "min_p", 0.0)),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=float(pick(body.repetition_penalty, "repetition_penalty", 1.0)),
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
        stop_token_ids=_stop_token_ids(body.stop_token_ids or [], vocab_size),
        ignore_eos=bool(body.ignore_eos),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        logprobs=request.logprobs,
    )


def check_token_ids(ids: list[int], vocab_size: int) -> None:
    """Refuse prompt token ids that the model does not have.

    Raises:
        BadRequest
    """
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"'prompt[{position}]' is {token_id}; token ids are 0 to {vocab_size - 1}", f"prompt[{position}]"
            )


def _checked(
    body: GenerationBody, *, chat: bool, max_tokens: int | None, max_tokens_param: str, **rest: Any
) -> GenerationRequest:
    _refuse_unbuilt(body)
    _check_range(max_tokens_param, max_tokens, 1)
    _check_range("min_tokens", body.min_tokens, 0)
    _check_range("temperature", body.temperature, 0, 2)
    _check_range("top_p", body.top_p, 0, 1, low_open=True)
    _check_range("top_k", body.top_k, -1)
    _check_range("min_p", body.min_p, 0, 1)
    _check_range("presence_penalty", body.presence_penalty, -2, 2)
    _check_range("frequency_penalty", body.frequency_penalty, -2, 2)
    _check_range("repetition_penalty", body.repetition_penalty, 0.01, 100)
    _check_range("seed", body.seed, -(1 << 63), (1 << 63) - 1)
    if body.stream_options is not None and not body.stream:
        raise BadRequest("'stream_options' is only allowed with 'stream': true", "stream_options")
    if len(body.stop_token_ids or []) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(f"'stop_token_ids' takes at most {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
    if len(body.logit_bias or {}) > MAX_LOGIT_BIAS:
        raise BadRequest(f"'logit_bias' takes at most {MAX_LOGIT_BIAS} entries", "logit_bias")
    options = body.stream_options
    return GenerationRequest(
        chat=chat,
        model=body.model,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        stop=_stop_strings(body.stop),
        body=body,
        **rest,
    )


def _decode(data: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        detail, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".").replace("[...]", "") or None
        raise BadRequest(f"'{param}': {detail}" if param else detail, param, "invalid_type") from error
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        param = _not_finite(data)
        if param:
            raise BadRequest(f"'{param}' is not a finite number", param) from error
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error


def _not_finite(data: bytes) -> str | None:
    """Name of the first top-level field that is, or holds, NaN or an infinity; these are not JSON, yet often sent."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None

    def bad(item: object) -> bool:
        if isinstance(item, float):
            return not math.isfinite(item)
        if isinstance(item, dict):
            return any(bad(v) for v in item.values())
        return isinstance(item, list) and any(bad(v) for v in item)

    if not isinstance(value, dict):
        return None
    return next((name for name, item in value.items() if bad(item)), None)


def _refuse_unbuilt(body: GenerationBody) -> None:
    if body.n is not None and body.n != 1:
        _check_range("n", body.n, 1)
        raise NotSupported("n", "only n=1")
    for name, harmless in NOT_BUILT.items():
        value = getattr(body, name)
        if value is None:
            continue
        # True == 1 in Python, and is not the same JSON value.
        if not any(value == allowed and type(value) is type(allowed) for allowed in harmless):
            raise NotSupported(name)


def _check_range(
    name: str, value: float | None, low: float, high: float | None = None, *, low_open: bool = False
) -> None:
    if value is None:
        return
    if value < low or (low_open and value == low) or (high is not None and value > high):
        above = f"greater than {low}" if low_open else f"at least {low}"
        below = "" if high is None else f" and at most {high}"
        raise BadRequest(f"'{name}' is {_shown(value)}; it must be {above}{below}", name)


def _shown(value: float) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:20]}..."


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        raise BadRequest(f"'stop' takes at most {MAX_STOP_STRINGS} strings, not {len(strings)}", "stop")
    for text in strings:
        if not text:
            raise BadRequest("'stop' must not contain an empty string", "stop")
        if len(text) > MAX_STOP_CHARS:
            raise BadRequest(f"a string of 'stop' has at most {MAX_STOP_CHARS} characters", "stop")
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"'stop_token_ids' has {_shown(token_id)}; token ids are 0 to {vocab_size - 1}", "stop_token_ids"
            )
    return tuple(dict.fromkeys(ids))


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    checked = {}
    for key, value in bias.items():
        if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) >= vocab_size:
            shown = key if len(key) <= 24 else f"{key[:20]}..."
            raise BadRequest(f"'logit_bias' has key {shown!r}; keys are token ids, 0 to {vocab_size - 1}", "logit_bias")
        if not -100 <= value <= 100:
            raise BadRequest(f"'logit_bias' of {key} is {_shown(value)}; values are -100 to 100", "logit_bias")
        checked[int(key)] = value
    return checked


def _prompt(prompt: str | list[Any] | None) -> str | list[int]:
    if prompt is None:
        raise BadRequest("'prompt' is required", "prompt", "missing_required_parameter")
    if isinstance(prompt, str):
        if not prompt:
            raise BadRequest("'prompt' must not be empty", "prompt")
        return prompt
    if not prompt:
        raise BadRequest("'prompt' must not be empty", "prompt")
    if isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise NotSupported("prompt", "a list of several prompts; send one request for each")
        only = prompt[0]
        if not only:
            raise BadRequest("'prompt[0]' must not be empty", "prompt[0]")
        if isinstance(only, str):
            return only
        prompt = only
    if set(map(type, prompt)) != {int}:
        where = next(f"prompt[{i}]" for i, item in enumerate(prompt) if type(item) is not int)
        raise BadRequest(
            f"'{where}' is not a token id; 'prompt' is a string or a list of token ids", where, "invalid_type"
        )
    return prompt


def _messages(messages: list[ChatMessage] | None) -> list[dict[str, Any]]:
    if messages is None:
        raise BadRequest("'messages' is required", "messages", "missing_required_parameter")
    if not messages:
        raise BadRequest("'messages' must not be empty", "messages")
    if sum(1 + (len(m.content) if isinstance(m.content, list) else 0) for m in messages) > MAX_MESSAGES:
        raise BadRequest(f"'messages' takes at most {MAX_MESSAGES} messages and parts of messages", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role in _TOOL_ROLES:
        raise NotSupported(f"{where}.role", f"role {message.role!r}")
    if message.role not in _ROLES:
        raise BadRequest(
            f"'{where}.role' is {message.role[:32]!r}; it must be one of {', '.join(_ROLES)}", f"{where}.role"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise NotSupported(f"{where}.{name}")
    content: str | list[dict[str, str]]
    if message.content is None:
        if message.role != "assistant":
            raise BadRequest(f"'{where}.content' is required", f"{where}.content", "missing_required_parameter")
        content = ""
    elif isinstance(message.content, str):
        content = message.content
    else:
        content = []
        for j, part in enumerate(message.content):
            if part.type != "text":
                raise NotSupported(f"{where}.content[{j}]", f"content of type {part.type[:32]!r}; only text is")
            if part.text is None:
                raise BadRequest(f"'{where}.content[{j}].text' is required", f"{where}.content[{j}].text")
            content.append({"type": "text", "text": part.text})
    # "developer" is OpenAI's newer word for "system"; chat templates know the older one.
    role = "system" if message.role == "developer" else message.role
    checked: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        checked["name"] = message.name
    return checked
