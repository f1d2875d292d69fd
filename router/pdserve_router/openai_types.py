"""Request bodies as the OpenAI API defines them, with vLLM's extensions. Unknown fields are ignored.

Only types are declared here; ranges and meaning are validate.py's. Fields typed ``Any`` are known and not built: they
are declared so that they can be refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec


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

    response_format: Any = None
    prompt_logprobs: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    use_beam_search: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    return_token_ids: Any = None
    priority: Any = None
    add_special_tokens: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. ``prompt`` is a string, a list of token ids, or a list of one of these."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None

    best_of: Any = None
    echo: Any = None
    suffix: Any = None


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

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    echo: Any = None
