"""Structured output at the router: what reaches the nodes, and calls that the model must make."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from pdserve_protocol.sampling import Grammar
from pdserve_router.structure import calls_grammar
from pdserve_text.grammar import GrammarCompiler
from pdserve_text.tokenizer import Tokenizer
from support.fake_node import FakeNode
from support.router_cluster import router_cluster
from support.tokenizers import EOS_ID, tiny_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Mapping

FILES = tiny_tokenizer_files()
TOKENIZER = Tokenizer.from_files(FILES)
CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


def drained(queue: asyncio.Queue[Any]) -> list[Any]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


def answer_of(path: str, body: Mapping[str, Any], says: str = "x") -> tuple[Any, list[Grammar | None]]:
    """The answer, and the grammars that the nodes were told."""

    async def main() -> tuple[Any, list[Grammar | None]]:
        tokens = [*TOKENIZER.encode(says, add_special_tokens=False), EOS_ID]
        nodes = [FakeNode(role, FILES, tokens=tokens, max_model_len=1024) for role in ("prefill", "decode")]  # type: ignore[arg-type]
        async with asyncio.timeout(60), router_cluster(nodes) as cluster:
            status, answer, _ = await cluster.post(path, dict(body))
            assert status == 200, answer
            return answer, [request.sampling.grammar for node in nodes for request in drained(node.requests)]

    return uvloop.run(main())


@pytest.mark.parametrize(
    ("path", "fields", "grammar"),
    [
        (CHAT, {"response_format": FORMAT}, Grammar(kind="json_schema", source=json.dumps(SCHEMA))),
        (CHAT, {"response_format": {"type": "json_object"}}, Grammar(kind="json_object")),
        (CHAT, {"response_format": {"type": "text"}}, None),
        (COMPLETION, {"structured_outputs": {"json": SCHEMA}}, Grammar(kind="json_schema", source=json.dumps(SCHEMA))),
        (COMPLETION, {"structured_outputs": {"json": "{}"}}, Grammar(kind="json_schema", source="{}")),
        (COMPLETION, {"structured_outputs": {"json_object": True}}, Grammar(kind="json_object")),
        (COMPLETION, {"structured_outputs": {"regex": "[0-9]+"}}, Grammar(kind="regex", source="[0-9]+")),
        (COMPLETION, {"structured_outputs": {"choice": ["yes", "no"]}}, Grammar(kind="choice", source='["yes", "no"]')),
        (COMPLETION, {"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(kind="grammar", source='start: "a"')),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
            Grammar(kind="json_schema", source=json.dumps(SCHEMA)),
        ),
    ],
)  # fmt: skip
def test_both_nodes_are_told_the_grammar(path: str, fields: dict[str, Any], grammar: Grammar | None) -> None:
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": "hi"} if path == COMPLETION else {"input": "hi"}
    _, told = answer_of(path, prompt | fields)
    assert told == [grammar, grammar]


@pytest.mark.parametrize(
    ("choice", "parallel", "says", "calls"),
    [
        ("required", None, '[{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city": "Oslo"}}]',
         [("now", "{}"), ("weather", '{"city": "Oslo"}')]),
        ("required", False, '[{"name": "now", "arguments": {}}]', [("now", "{}")]),
        ({"type": "function", "function": {"name": "weather"}}, None,
         '[{"name": "weather", "arguments": {"city": "Rome"}}]', [("weather", '{"city": "Rome"}')]),
    ],
)  # fmt: skip
def test_a_model_that_must_call_calls(
    choice: Any, parallel: bool | None, says: str, calls: list[tuple[str, str]]
) -> None:
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    answer, (grammar, _) = answer_of(CHAT, body, says)
    message = answer["choices"][0]["message"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == calls
    assert not message["content"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert grammar is not None
    assert keeps_to(grammar, says)


def keeps_to(grammar: Grammar, text: str) -> bool:
    """Whether ``text`` is all that the grammar asks for."""
    matcher = GrammarCompiler(FILES, [EOS_ID]).matcher(grammar.kind, grammar.source)
    return all(matcher.append(token_id) for token_id in [*TOKENIZER.encode(text, add_special_tokens=False), EOS_ID])


def test_the_grammar_of_calls_allows_nothing_else() -> None:
    inner = {"properties": {"x": {"$ref": "#/$defs/deep"}}, "required": ["x"], "$defs": {"deep": {"const": "::="}}}
    functions = {"weather": CITY, "in.ner": inner}
    one, several = (calls_grammar(functions, parallel=parallel) for parallel in (False, True))
    oslo, deep = '{"name": "weather", "arguments": {"city": "Oslo"}}', '{"name": "in.ner", "arguments": {"x": "::="}}'
    assert keeps_to(one, f"[{oslo}]")
    assert keeps_to(several, f"[{oslo}, {deep}, {oslo}]")
    assert not keeps_to(one, f"[{oslo}, {deep}]")
    for wrong in ("[]", oslo, f"[{oslo.replace('Oslo', 'Bern')}]", f"[{oslo.replace('weather', 'other')}]"):
        assert not keeps_to(several, wrong)
