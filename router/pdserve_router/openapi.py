"""The OpenAPI document, made from the types that bodies are decoded to and answers encoded from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from pdserve_router.openai_answers import (
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorAnswer,
    Model,
    ModelList,
    Response,
    Tokenized,
    Version,
)
from pdserve_router.openai_types import ChatBody, CompletionBody, DetokenizeBody, ResponsesBody, TokenizeBody


@dataclass(frozen=True)
class Operation:
    """``body`` and ``answer`` are types; no answer type is a document of its own kind."""

    method: str
    path: str
    summary: str
    body: type | None = None
    answer: type | None = None
    streams: bool = False


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", ChatBody, ChatCompletion, streams=True),
    Operation("post", "/v1/completions", "Continue texts", CompletionBody, Completion, streams=True),
    Operation("post", "/v1/responses", "Answer, in the shape of the newer API", ResponsesBody, Response, streams=True),
    Operation("get", "/v1/models", "Models served", answer=ModelList),
    Operation("get", "/v1/models/{model}", "One model", answer=Model),
    Operation("post", "/tokenize", "Tokens of a prompt", TokenizeBody, Tokenized),
    Operation("post", "/detokenize", "Text of tokens", DetokenizeBody, Detokenized),
    Operation("get", "/health", "The router lives; what it knows of each node"),
    Operation("get", "/ready", "A request would be served"),
    Operation("get", "/version", "Version of the software", answer=Version),
    Operation("get", "/metrics", "Prometheus metrics"),
    Operation("get", "/openapi.json", "This document"),
)


@cache
def document() -> bytes:
    """The document as JSON."""
    types = [kind for o in OPERATIONS for kind in (o.body, o.answer) if kind is not None] + [ErrorAnswer]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_type)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "pdserve router", "version": version("pdserve")},
            "paths": paths,
            "components": {"schemas": components},
        }
    )


def _operation(operation: Operation, by_type: dict[type, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain" if operation.path == "/metrics" else "application/json": {}}
    if operation.answer is not None:
        content["application/json"] = {"schema": by_type[operation.answer]}
    if operation.streams:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    failed = {"content": {"application/json": {"schema": by_type[ErrorAnswer]}}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Done", "content": content},
            "4XX": {"description": "The request cannot be served as it is"} | failed,
            "5XX": {"description": "The request could not be served"} | failed,
        },
    }
    if operation.body is not None:
        body = {"application/json": {"schema": by_type[operation.body]}}
        described["requestBody"] = {"required": True, "content": body}
    if "{model}" in operation.path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described
