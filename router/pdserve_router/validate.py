"""From bytes to checked values: every 4xx about a field is raised here, before any node works.

Two steps: ``parse_chat``, ``parse_completion`` and ``parse_responses`` need nothing but the body; ``sampling_params``
needs what only the model knows (vocabulary, defaults, limits) and the prompt's length.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from pdserve_protocol.requests import MAX_OPEN_PROMPT_TOKENS
from pdserve_protocol.sampling import Grammar, SamplingParams

from pdserve_router.errors import BadRequest, ContextTooLong, NotSupported
from pdserve_router.messages import ChatPrompt, chat_prompt, messages_of_items
from pdserve_router.openai_types import (
    MAX_PROMPTS,
    NOT_BUILT,
    NOT_BUILT_COMPLETIONS,
    NOT_BUILT_RESPONSES,
    Body,
    ChatBody,
    CompletionBody,
    Function,
    GenerationBody,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    ResponseNamedTool,
    ResponsesBody,
    ResponseTextFormat,
    Tool,
    body_decoder,
)
from pdserve_router.structure import RESPONSES_FORMAT, calls_grammar, wanted_grammar

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_CHOICES = 1024
DEFAULT_COMPLETION_TOKENS = 16
_SEED_MASK = (1 << 63) - 1

_chat_decoder = body_decoder(ChatBody, NOT_BUILT)
_completion_decoder = body_decoder(CompletionBody, NOT_BUILT_COMPLETIONS)
_responses_decoder = body_decoder(ResponsesBody, NOT_BUILT_RESPONSES)

Endpoint = Literal["chat", "completion", "responses"]
Prompt = str | list[int] | ChatPrompt


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One request, as far as it can be checked without knowing the model.

    Attributes:
        prompts: more than one only from the completions endpoint.
        n: choices of each prompt.
        max_tokens: None where the client gave none.
        max_tokens_param: the field that ``max_tokens`` came from, for messages.
        logprobs: most probable tokens to report beside the chosen one; None reports nothing.
        tools: functions that the model may call, by name with the schema of the arguments; none where it may not.
        must_call: the answer consists of calls, as a JSON list.
        grammar: what the output must look like; ``grammar_param`` is the field that says so.
        original: the body of the responses endpoint, which its answer repeats.
    """

    endpoint: Endpoint
    model: str | None
    prompts: list[Prompt]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    max_tokens_param: str
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    logprobs: int | None
    echo: bool = False
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    must_call: bool = False
    grammar: Grammar | None = None
    grammar_param: str = ""
    body: GenerationBody = field(repr=False)
    original: ResponsesBody | None = field(default=None, repr=False)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As ``logprobs``, for the prompt's tokens: those that the client asked for, and those of an echo."""
        wanted = [self.body.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def prompt_param(self) -> str:
        """The field that the prompt came from."""
        return {"chat": "messages", "completion": "prompt", "responses": "input"}[self.endpoint]


def parse_chat(data: bytes) -> GenerationRequest:
    """A chat completion request.

    Raises:
        BadRequest: the first fault found, with the field named.
    """
    body = decode_body(data, _chat_decoder)
    refuse_unbuilt(body, NOT_BUILT)
    return _chat(body, "chat")


def parse_completion(data: bytes) -> GenerationRequest:
    """A text completion request.

    Raises:
        BadRequest: the first fault found, with the field named.
    """
    body = decode_body(data, _completion_decoder)
    refuse_unbuilt(body, NOT_BUILT_COMPLETIONS)
    return _checked(
        body,
        endpoint="completion",
        prompts=_prompts(body.prompt),
        max_tokens=body.max_tokens,
        max_tokens_param="max_tokens",
        logprobs=body.logprobs,
        echo=bool(body.echo),
    )


def parse_responses(data: bytes) -> GenerationRequest:
    """A request to the responses endpoint, as the chat request that it amounts to.

    Raises:
        BadRequest: the first fault found, with the field named.
    """
    body = decode_body(data, _responses_decoder)
    refuse_unbuilt(body, NOT_BUILT_RESPONSES)
    # Nothing to choose from is nothing to choose, to this API.
    choice = None if body.tool_choice == "auto" and not body.tools else body.tool_choice
    chat = ChatBody(
        messages=messages_of_items(body.input, body.instructions),
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=[
            Tool(function=Function(name=t.name, description=t.description, parameters=t.parameters, strict=t.strict))
            for t in body.tools or []
        ],
        tool_choice=NamedTool(function=NamedFunction(name=choice.name))
        if isinstance(choice, ResponseNamedTool)
        else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text.format if body.text else None),
    )
    return _chat(chat, "responses", original=body)


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
        raise ContextTooLong(num_prompt_tokens, None, limit, request.prompt_param)
    if request.max_tokens is not None and request.max_tokens > room:
        raise ContextTooLong(num_prompt_tokens, request.max_tokens, limit, request.max_tokens_param)
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = min(DEFAULT_COMPLETION_TOKENS, room) if request.endpoint == "completion" else room
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(
            f"'min_tokens' is {_shown(min_tokens)}, more than the {max_tokens} of 'max_tokens'", "min_tokens"
        )

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
        # More than the vocabulary keeps all, and a huge number has no place in a message.
        top_k=top_k if 0 < top_k < vocab_size else 0,
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
        prompt_logprobs=request.num_prompt_logprobs,
        grammar=request.grammar,
    )


def check_token_ids(ids: list[int], vocab_size: int, param: str = "prompt") -> None:
    """Refuse token ids that the model does not have.

    Raises:
        BadRequest
    """
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            where = f"{param}[{position}]"
            raise BadRequest(f"'{where}' is {_shown(token_id)}; token ids are 0 to {vocab_size - 1}", where)


def check_num_prompt_tokens(request: GenerationRequest, num_tokens: int) -> None:
    """Refuse what a node would never take, as each choice counts its prompt. ``num_tokens``: of all prompts.

    Raises:
        BadRequest
    """
    num_asked = num_tokens * request.n
    if num_asked > MAX_OPEN_PROMPT_TOKENS:
        param = "n" if request.n > 1 else request.prompt_param
        raise BadRequest(
            f"The prompts of all choices have {num_asked} tokens together; at most {MAX_OPEN_PROMPT_TOKENS}", param
        )


def decode_body(data: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """A body of the decoder's type.

    Raises:
        BadRequest: no JSON, or a field whose type or range is wrong, which is named.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        detail, _, place = str(error).partition(" - at ")
        path = re.search(r"`\$\.?([^`]*)`", place)
        param = path[1].replace("[...]", "") if path else ""
        missing = re.fullmatch(r"Object missing required field `(.*)`", detail)
        if missing:
            param = f"{param}.{missing[1]}" if param else missing[1]
            raise BadRequest(f"'{param}' is required", param, "missing_required_parameter") from error
        raise BadRequest(f"'{param}': {detail}" if param else detail, param or None, "invalid_type") from error
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        param = _not_finite(data) or ""
        if param:
            raise BadRequest(f"'{param}' is not a finite number", param) from error
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error


def refuse_unbuilt(body: msgspec.Struct, not_built: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse fields that ask for what this server has not.

    Raises:
        NotSupported
    """
    for name, harmless in not_built.items():
        value = getattr(body, name)
        if value is None:
            continue
        # True == 1 in Python, and is not the same JSON value.
        if not any(value == allowed and type(value) is type(allowed) for allowed in harmless):
            raise NotSupported(name)


def _chat(body: ChatBody, endpoint: Endpoint, original: ResponsesBody | None = None) -> GenerationRequest:
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    tools, must_call = _offered_tools(body)
    prompt = chat_prompt(
        body.messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    newer = body.max_completion_tokens is not None
    newer_name = "max_output_tokens" if endpoint == "responses" else "max_completion_tokens"
    return _checked(
        body,
        endpoint=endpoint,
        prompts=[prompt],
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        max_tokens_param=newer_name if newer else "max_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tools={tool.function.name: tool.function.parameters or {} for tool in tools},
        parallel_tool_calls=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool),
        must_call=must_call,
        original=original,
    )


def _offered_tools(body: ChatBody) -> tuple[list[Tool], tuple[str, ...]]:
    """The tools that the model is told of, and those of which it must call one.

    With "none" it hears of none, so that it calls none.
    """
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise BadRequest("'tools' has two functions of the same name", "tools")
    if choice in (None, "none", "auto"):
        if choice == "auto" and not tools:
            raise BadRequest("'tool_choice' needs 'tools'", "tool_choice")
        return [] if choice == "none" else tools, ()
    if not tools:
        raise BadRequest("'tool_choice' needs 'tools'", "tool_choice")
    if not isinstance(choice, NamedTool):
        return tools, tuple(names)
    if choice.function.name not in names:
        raise BadRequest(f"'tool_choice' names {choice.function.name!r}, which 'tools' has not", "tool_choice")
    return tools, (choice.function.name,)


def _checked(
    body: GenerationBody,
    *,
    endpoint: Endpoint,
    prompts: list[Prompt],
    tools: dict[str, dict[str, Any]] | None = None,
    parallel_tool_calls: bool = True,
    must_call: tuple[str, ...] = (),
    **rest: Any,
) -> GenerationRequest:
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        if body.best_of < n:
            raise BadRequest(f"'best_of' is {body.best_of}, less than the {n} of 'n'", "best_of")
        raise NotSupported("best_of", "only as many as 'n'")
    if len(prompts) * n > MAX_CHOICES:
        raise BadRequest(f"'n' choices of each prompt are {len(prompts) * n}; at most {MAX_CHOICES} in all", "n")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("'stream_options' is only allowed with 'stream': true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise NotSupported("prompt_logprobs", "not with 'stream': true")
    structure = wanted_grammar(body, RESPONSES_FORMAT if endpoint == "responses" else "response_format")
    if must_call:
        if structure is not None:
            raise BadRequest(f"'tool_choice' asks for a call, and '{structure[0]}' for something else", "tool_choice")
        functions = {name: (tools or {})[name] for name in must_call}
        structure = "tools", calls_grammar(functions, parallel=parallel_tool_calls)
    if structure is not None and body.ignore_eos:
        raise BadRequest(f"'ignore_eos' cannot go with '{structure[0]}': what is complete ends", "ignore_eos")
    options = body.stream_options
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return GenerationRequest(
        endpoint=endpoint,
        model=body.model,
        prompts=prompts,
        n=n,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        stop=tuple(dict.fromkeys(stop)),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        tools=tools or {},
        parallel_tool_calls=parallel_tool_calls,
        must_call=bool(must_call),
        grammar=structure[1] if structure is not None else None,
        grammar_param=structure[0] if structure is not None else "",
        body=body,
        **rest,
    )


def _response_format(text: ResponseTextFormat | None) -> ResponseFormat | None:
    if text is None:
        return None
    schema = None
    if text.type == "json_schema":
        schema = JsonSchemaFormat(
            name=text.name or "", description=text.description, schema=text.schema, strict=text.strict
        )
    return ResponseFormat(type=text.type, json_schema=schema)


def _not_finite(data: bytes) -> str | None:
    """Name of the first top-level field that is, or holds, NaN or an infinity; these are not JSON, yet often sent."""

    def bad(item: object) -> bool:
        try:
            json.dumps(item, allow_nan=False)
        except ValueError:
            return True
        return False

    try:
        value = json.loads(data)
        return next((name for name, item in value.items() if bad(item)), None) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _shown(value: float) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:20]}..."


def _stop_token_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"'stop_token_ids' has {_shown(token_id)}; token ids are 0 to {vocab_size - 1}", "stop_token_ids"
            )
    return tuple(dict.fromkeys(ids))


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    for key in bias:
        if int(key) >= vocab_size:
            raise BadRequest(f"'logit_bias' has key {key!r}; keys are token ids, 0 to {vocab_size - 1}", "logit_bias")
    return {int(key): value for key, value in bias.items()}


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        _check_alike(prompt, int, "a token id")
        return [prompt]  # type: ignore[list-item]
    _check_alike(prompt, type(prompt[0]), "a string" if isinstance(prompt[0], str) else "a list of token ids")
    if len(prompt) > MAX_PROMPTS:
        raise BadRequest(f"'prompt' takes at most {MAX_PROMPTS} prompts, not {len(prompt)}", "prompt")
    for i, item in enumerate(prompt):
        if not item:
            raise BadRequest(f"'prompt[{i}]' must not be empty", f"prompt[{i}]")
    return list(prompt)  # type: ignore[arg-type]


def _check_alike(prompt: list[Any], kind: type, meant: str) -> None:
    if set(map(type, prompt)) != {kind}:
        where = next(f"prompt[{i}]" for i, item in enumerate(prompt) if type(item) is not kind)
        raise BadRequest(
            f"'{where}' is not {meant}, as the first one is; prompts are all of one kind", where, "invalid_type"
        )
