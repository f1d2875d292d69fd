"""/tokenize and /detokenize, in vLLM's shapes: what a prompt is in tokens, without a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdserve_router.errors import BadRequest
from pdserve_router.messages import chat_prompt
from pdserve_router.openai_answers import Detokenized, Tokenized
from pdserve_router.openai_types import DetokenizeBody, TokenizeBody, body_decoder
from pdserve_router.validate import check_token_ids, decode_body

if TYPE_CHECKING:
    from pdserve_router.registry import NodeRegistry
    from pdserve_router.validate import Prompt

# The size of the body is the limit here.
_ANY_LENGTH = 1 << 62
_tokenize_decoder = body_decoder(TokenizeBody, {})
_detokenize_decoder = body_decoder(DetokenizeBody, {})


class TokensApi:
    def __init__(self, registry: NodeRegistry) -> None:
        self._registry = registry

    async def tokenize(self, http: web.Request) -> web.Response:
        """POST /tokenize"""
        body = decode_body(await http.read(), _tokenize_decoder)
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
        pieces = None
        if body.return_token_strs:
            pieces = [served.text.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        return _json(Tokenized(count=len(ids), max_model_len=served.limit, tokens=ids, token_strs=pieces))

    async def detokenize(self, http: web.Request) -> web.Response:
        """POST /detokenize"""
        body = decode_body(await http.read(), _detokenize_decoder)
        served = self._registry.resolve(body.model)
        check_token_ids(body.tokens, served.vocab_size, "tokens")
        return _json(Detokenized(prompt=served.text.tokenizer.decode(body.tokens, skip_special_tokens=False)))


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
