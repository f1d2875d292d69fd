"""Request bodies as the OpenAI API defines them, with vLLM's extensions. Unknown fields are ignored.

Only types are declared here; ranges and meaning are validate.py's. ``NOT_BUILT`` is the one list of fields that the API
has and this server has not.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

# Field by field, the values that ask for nothing; any other is refused by name.
NOT_BUILT: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "priority": (0,),
    "add_special_tokens": (),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "reasoning_effort": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_embeds": (),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
}
Body = TypeVar("Body", bound="GenerationBody")


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both endpoints share. None is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    cache_salt: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. ``prompt`` is a string, a list of token ids, or a list of one of these."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None

    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def body_decoder(body: type[Body]) -> msgspec.json.Decoder[Body]:
    """Decodes to ``body``, with an attribute for each field of NOT_BUILT beside its own."""
    unbuilt = [(name, Any, None) for name in NOT_BUILT]
    return msgspec.json.Decoder(msgspec.defstruct(body.__name__, unbuilt, bases=(body,), kw_only=True))
