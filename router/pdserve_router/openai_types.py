"""Request bodies as the OpenAI API defines them, with vLLM's extensions. Unknown fields are ignored.

Types and ranges are declared here, and the OpenAPI document is made from the same declarations; what fields mean
together is validate.py's. None is the same as absent. ``NOT_BUILT`` lists the fields that the API has and this
server has not.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

MAX_N = 128
MAX_PROMPTS = 256
MAX_MESSAGES = 2048
MAX_TOOLS = 256
MAX_LOGPROBS = 20
MAX_TOKENS = 1 << 20
"""What /tokenize and /detokenize show at once."""
_ROLES = Literal["system", "developer", "user", "assistant", "tool", "function"]

# Field by field, the values that ask for nothing; any other is refused by name.
NOT_BUILT: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "add_special_tokens": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "reasoning_effort": (),
    "prediction": (),
    "prompt_embeds": (),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
}
# A plain text gets what the tokenizer adds to one.
NOT_BUILT_COMPLETIONS = NOT_BUILT | {"add_special_tokens": (True,)}
# The same for /v1/responses, whose fields partly have other meanings.
NOT_BUILT_RESPONSES: dict[str, tuple[object, ...]] = {
    "previous_response_id": (),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "conversation": (),
    "background": (False,),
    "store": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "prompt": (),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "context_management": ([],),
}

Body = TypeVar("Body", bound=msgspec.Struct)

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId = Annotated[int, Meta(ge=0)]
ShortText = Annotated[str, Meta(max_length=1024)]
# Of an earlier call, whose name may have been the model's own invention.
CalledName = Annotated[str, Meta(min_length=1, max_length=1024)]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's extension; exactly one of the fields."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=1024),
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: ShortText | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    user: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. ``prompt`` is a string, a list of token ids, or a list of one of these."""

    prompt: Annotated[str, Meta(min_length=1)] | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    logprobs: NumLogprobs | None = None
    echo: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: CalledName
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that an assistant made in an earlier turn."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    role: _ROLES
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None
    audio: Any = None


class Function(msgspec.Struct, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    name: FunctionName


class NamedTool(msgspec.Struct, kw_only=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponseInputItem(msgspec.Struct, kw_only=True):
    """A message, a function call of an earlier turn, its output, or earlier reasoning, by ``type``."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    name: CalledName | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | list[ContentPart] | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseNamedTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: FunctionName


class ResponseTextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseText(msgspec.Struct, kw_only=True):
    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    input: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[ResponseInputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    )
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    metadata: Annotated[dict[ShortText, ShortText], Meta(max_length=16)] | None = None
    user: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


def body_decoder(body: type[Body], not_built: dict[str, tuple[object, ...]]) -> msgspec.json.Decoder[Body]:
    """Decodes to ``body``, with an attribute for each field of ``not_built`` beside its own."""
    unbuilt = [(name, Any, None) for name in not_built]
    return msgspec.json.Decoder(msgspec.defstruct(body.__name__, unbuilt, bases=(body,), kw_only=True))
