"""/tokenize and /detokenize, in vLLM's shapes: what a prompt is in tokens, without a node."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdserve_router.errors import BadRequest
from pdserve_router.messages import chat_prompt
from pdserve_router.openai_answers import Detokenized, Tokenized
from pdserve_router.openai_types import MAX_TOKENS, DetokenizeBody, TokenizeBody, body_decoder
from pdserve_router.request_body import read_body
from pdserve_router.validate import check_token_ids, decode_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve_router.registry import NodeRegistry
    from pdserve_router.validate import Prompt

# Whether they are more than MAX_TOKENS shows when they are there.
_ANY_LENGTH = 1 << 62
_tokenize_decoder = body_decoder(TokenizeBody, {})
_detokenize_decoder = body_decoder(DetokenizeBody, {})


class TokensApi:
    def __init__(self, registry: NodeRegistry) -> None:
        self._registry = registry

    async def tokenize(self, http: web.Request) -> web.Response:
        """POST /tokenize"""
        body = decode_body(await read_body(http), _tokenize_decoder)
        served = self._registry.resolve(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("Either 'prompt' or 'messages' is required", "prompt")
        prompt: Prompt = body.prompt or ""
        if body.messages is not None:
            prompt = chat_prompt(
                body.messages,
                tools=body.tools or (),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                variables=body.chat_template_kwargs,
            )
        param = "prompt" if body.messages is None else "messages"
        ids: list[int] = []
        if prompt:
            ids = await served.text.prompt_ids(prompt, _ANY_LENGTH, param, add_special_tokens=body.add_special_tokens)
        if len(ids) > MAX_TOKENS:
            raise BadRequest(f"'{param}' has {len(ids)} tokens; at most {MAX_TOKENS}", param)

        def answer() -> Tokenized:
            token_bytes = served.text.tokenizer.token_bytes
            pieces = [token_bytes(i).decode("utf-8", "replace") for i in ids] if body.return_token_strs else None
            return Tokenized(count=len(ids), max_model_len=served.limit, tokens=ids, token_strs=pieces)

        return await _json(answer)

    async def detokenize(self, http: web.Request) -> web.Response:
        """POST /detokenize"""
        body = decode_body(await read_body(http), _detokenize_decoder)
        served = self._registry.resolve(body.model)

        def answer() -> Detokenized:
            check_token_ids(body.tokens, served.vocab_size, "tokens")
            return Detokenized(prompt=served.text.tokenizer.decode(body.tokens, skip_special_tokens=False))

        return await _json(answer)


async def _json(answer: Callable[[], msgspec.Struct]) -> web.Response:
    """What ``answer`` returns. It is made aside: of a million tokens it takes longer than streams may wait."""
    data = await asyncio.get_running_loop().run_in_executor(None, lambda: msgspec.json.encode(answer()))
    return web.Response(body=data, content_type="application/json")
