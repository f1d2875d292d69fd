"""Structured output at the router: what reaches the nodes, and calls that the model must make."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from pdserve_protocol.sampling import Grammar
from pdserve_router.structure import after_thinking, calls_grammar
from pdserve_text.grammar import GrammarCompiler
from pdserve_text.tokenizer import Tokenizer
from support.fake_node import FakeNode
from support.router_cluster import router_cluster
from support.tokenizers import EOS_ID, tiny_tokenizer_files
from support.tool_tokenizer import tool_tokenizer_files

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


def keeps_to(grammar: Grammar, text: str, files: dict[str, bytes] = FILES) -> bool:
    """Whether ``text`` is all that the grammar asks for."""
    matcher = GrammarCompiler(files, [EOS_ID]).matcher(grammar.kind, grammar.source)
    token_ids = Tokenizer.from_files(files).encode(text, add_special_tokens=False)
    return all(matcher.append(token_id) for token_id in [*token_ids, EOS_ID])


def with_tags() -> dict[str, bytes]:
    """A tokenizer that has a token for each tag."""
    tokenizer = json.loads(FILES["tokenizer.json"])
    for number, tag in enumerate(("<think>", "</think>")):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": TOKENIZER.vocab_size + number, "content": tag, **flags})
    return FILES | {"tokenizer.json": json.dumps(tokenizer).encode()}


@pytest.mark.parametrize(
    ("grammar", "calls", "text"),
    [
        (Grammar(kind="json_schema", source=json.dumps(SCHEMA | {"title": "::="})), False, '{"a": 5}'),
        (Grammar(kind="json_object"), False, '{"b": [1]}'),
        (Grammar(kind="regex", source=r"[0-9]+/\\/[ab]\/"), False, "12/\\\\/a/".replace("\\\\", "\\")),
        (Grammar(kind="choice", source='["yes", "東京"]'), False, "東京"),
        (calls_grammar({"weather": CITY}, parallel=True), True,
         '[{"name": "weather", "arguments": {"city": "Oslo"}}]'),
    ],
)  # fmt: skip
def test_the_grammar_is_for_what_follows_thinking(grammar: Grammar, calls: bool, text: str) -> None:
    assert keeps_to(grammar, text)
    for files in (FILES, with_tags()):
        tokens = files is not FILES
        begun, maybe = (
            after_thinking(grammar, begun=begun, calls=calls, tags_are_tokens=tokens) for begun in (True, False)
        )
        for whole, thinking, right in (
            (begun, "hm <b>\n</think>\n\n", True),
            (begun, "</think>", True),
            (begun, "", False),
            (maybe, "<think>\nhm\n</think>\n\n", True),
            (maybe, "", True),
            (maybe, "hm</think>", False),
        ):
            assert keeps_to(whole, thinking + text, files) is right
            assert not keeps_to(whole, thinking + text[:-1] + "#", files)


def test_a_model_that_thinks_does_so_before_its_structure() -> None:
    files = tool_tokenizer_files()

    async def main() -> None:
        tokens = [
            *Tokenizer.from_files(files).encode('<think>\nhm\n</think>\n\n{"a": 5}', add_special_tokens=False),
            EOS_ID,
        ]
        nodes = [FakeNode(role, files, tokens=tokens, max_model_len=1024) for role in ("prefill", "decode")]  # type: ignore[arg-type]
        async with asyncio.timeout(60), router_cluster(nodes) as cluster:
            body = {"messages": [USER], "response_format": FORMAT}
            _, answer, _ = await cluster.post(CHAT, body)
            message = answer["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("hm", '{"a": 5}')
            told = drained(nodes[0].requests)[0].sampling.grammar
            assert keeps_to(told, '<think>hm</think>{"a": 5}')
            await cluster.post(CHAT, body | {"chat_template_kwargs": {"enable_thinking": False}})
            assert drained(nodes[0].requests)[0].sampling.grammar.kind == "json_schema"

    uvloop.run(main())


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
