"""Answers as the OpenAI API defines them, with vLLM's extensions and the proof. The OpenAPI document shows them."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pdserve_router.proof import Proof

AnswerReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class UsageAnswer(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Four lists with one item per token; the first of an echoed prompt has null in place of its log probabilities.
    Offsets are characters of the choice's text; the chosen token is always among its ``top_logprobs``; a token that is
    a part of a character is written as "bytes:" and its bytes.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: AnswerReason
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    pdserve: Proof | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer
    pdserve: Proof | UnsetType = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    """The token's text as far as it is text, and its exact bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunctionAnswer(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCallAnswer(msgspec.Struct, kw_only=True):
    id: str
    function: CalledFunctionAnswer
    type: Literal["function"] = "function"


class ChatMessageAnswer(msgspec.Struct, kw_only=True):
    """``content`` is null where all that came was function calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: AnswerReason
    pdserve: Proof | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    pdserve: Proof | UnsetType = UNSET


class ErrorObject(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    error: ErrorObject


class Model(msgspec.Struct, kw_only=True):
    id: str
    created: int
    max_model_len: int
    vocab_size: int
    object: Literal["model"] = "model"
    owned_by: Literal["pdserve"] = "pdserve"


class ModelList(msgspec.Struct, kw_only=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


class Version(msgspec.Struct, kw_only=True):
    version: str


class ResponseUsageInput(msgspec.Struct, kw_only=True):
    cached_tokens: int


class ResponseUsageOutput(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: ResponseUsageInput
    output_tokens: int
    total_tokens: int
    output_tokens_details: ResponseUsageOutput = msgspec.field(default_factory=ResponseUsageOutput)


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class ResponseIncomplete(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(msgspec.Struct, kw_only=True):
    """What /v1/responses answers. Much of it repeats the request, as the API has it."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[dict[str, Any]]
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: ResponseIncomplete | None = None
    object: Literal["response"] = "response"
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    background: Literal[False] = False
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None
    pdserve: Proof | UnsetType = UNSET
