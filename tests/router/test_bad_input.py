"""Bad input of every kind is answered 4xx with the field named, before any node hears of it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from support.router_cluster import pair, router_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.router_cluster import RouterCluster

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HUGE = 10**400
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETION: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
Case = tuple[str, Any, str | None]


def _both(field: str, *values: Any, **with_: Any) -> Iterator[Case]:
    for path in (CHAT, COMPLETION):
        for value in values:
            yield path, {field: value, **with_}, field


def _of(path: str, field: str, *values: Any, param: str | None = None, **with_: Any) -> Iterator[Case]:
    for value in values:
        yield path, {field: value, **with_}, param or field


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def _cases() -> Iterator[Case]:
    # Numbers: too small, too large, huge, of another type.
    yield from _both("temperature", -0.1, 2.1, "hot", True, [], {}, HUGE)
    yield from _both("top_p", 0, -1, 1.01, "x", HUGE)
    yield from _both("top_k", -2, 1.5, "5", True, None.__class__.__name__)
    yield from _both("min_p", -0.1, 1.5, [])
    yield from _both("presence_penalty", -2.1, 2.1, "x")
    yield from _both("frequency_penalty", -2.1, 2.1, {})
    yield from _both("repetition_penalty", 0, -1, 101, 1e-310)
    yield from _both("max_tokens", 0, -1, 1.5, "5", True, HUGE, 10**6)
    yield from _both("min_tokens", -1, "x", 10**6)
    yield from _both("seed", 1 << 63, -(1 << 63) - 1, HUGE, "lucky", 1.5)
    yield from _both("n", 0, -1, 129, HUGE, "2", 1.5)
    yield from _both("best_of", 2, 0, 129, "x")
    yield from _both("best_of", 1, n=2)
    # Texts and lists: empty, too long, too many, of other things.
    yield from _both("stop", "", [""], ["x"] * 17, "x" * 1025, ["x" * 1025], 5, {}, [5], [None])
    yield from _both("stop_token_ids", [-1], [384], [10**6], [HUGE], ["x"], [1.5], [True], 5, list(range(257)))
    yield from _both("logit_bias", {"AI": -100}, {"999999": 5}, {"-1": 1}, {"5": 101}, {"5": "x"}, {"": 1}, [1], "x")
    yield from _both("logit_bias", {str(i): 0 for i in range(1025)})
    # Switches and names.
    for name in ("stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
        yield from _both(name, "yes", 1, [])
    yield from _both("stream_options", {"include_usage": True}, 5)
    yield from _both("stream_options", {"include_usage": "x"}, [1], stream=True)
    yield from _both("model", 5, [], {})
    yield from _both("cache_salt", 5, "x" * 1025)
    yield from _both("user", 5, {})
    # Structure.
    yield from _both("response_format", {"type": "xml"}, {}, "json", 5, {"type": "json_schema"}, schema_format(None))
    yield RESPONSES, {"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"
    yield from _both("response_format", schema_format({"type": "objct"}), schema_format({"$ref": "#/nowhere"}))
    yield from _both("response_format", schema_format({"type": "array", "uniqueItems": True}))
    yield from _both("structured_outputs", {}, {"regex": 5}, 5, {"regex": "a", "choice": ["b"]}, {"regex": "a(b"})
    yield from _both("structured_outputs", {"json": "{"}, {"json": '{"type": 5}'}, {"grammar": "start: missing"})
    yield from _both("structured_outputs", {"choice": []}, {"choice": [""]}, {"choice": ["a"] * 1001}, {"choice": [5]})
    yield from _both("structured_outputs", {"regex": "a"}, response_format={"type": "json_object"})
    yield from _both("ignore_eos", True, structured_outputs={"regex": "a"})
    # Known, and not built.
    yield from _both("guided_json", {})
    yield from _both("use_beam_search", True)
    yield from _both("prompt_logprobs", -1, 21, "x", True)
    yield from _both("prompt_logprobs", 0, 1, stream=True)
    yield from _both("priority", 2**31, 1.5, "high")
    yield from _both("suffix", "x")
    yield from _both("prompt_embeds", "AAAA")
    yield from _both("length_penalty", 0.5)
    yield from _both("allowed_token_ids", [1])
    # Prompts.
    yield from _of(COMPLETION, "prompt", None, "", [], 5, {}, True)
    yield from _of(COMPLETION, "prompt", [""], [[]], [1.5], [True], [None], [{}], [HUGE], param="prompt[0]")
    yield from _of(
        COMPLETION, "prompt", [5, 384], [5, -1], ["a", ""], ["a", 5], ["a", [5]], [5, "a"], param="prompt[1]"
    )
    yield from _of(COMPLETION, "prompt", [[5], [384]], [[5], ["a"]], param="prompt[1][0]")
    yield from _of(COMPLETION, "prompt", ["x"] * 257, [5] * 300, "x " * 500)
    yield from _of(COMPLETION, "n", 128, prompt=["x"] * 9)
    yield from _of(COMPLETION, "logprobs", -1, 21, True, "x", 1.5)
    yield from _of(COMPLETION, "echo", "x", 1)
    yield COMPLETION, {"echo": True, "max_tokens": 0}, "max_tokens"
    # Messages.
    yield from _of(CHAT, "messages", None, [], "hi", 5, {}, [USER] * 2049)
    yield from _of(CHAT, "messages", [5], ["hi"], [None], [[]], param="messages[0]")
    yield from _of(CHAT, "messages", [{}], [{"role": "boss", "content": "x"}], [{"role": 5}], param="messages[0].role")
    yield from _of(CHAT, "messages", [{"role": "function", "content": "x"}], param="messages[0].role")
    yield from _of(CHAT, "messages", [{"role": "user"}], [USER | {"content": 5}], param="messages[0].content")
    yield from _of(CHAT, "messages", [USER | {"content": [{"type": "image_url"}]}], param="messages[0].content[0]")
    yield from _of(CHAT, "messages", [USER | {"content": [{"type": "text"}]}], param="messages[0].content[0].text")
    yield from _of(CHAT, "messages", [USER | {"content": [{"text": "x"}]}], param="messages[0].content[0].type")
    yield from _of(CHAT, "messages", [USER | {"tool_calls": [CALL]}], param="messages[0].tool_calls")
    yield from _of(CHAT, "messages", [USER | {"name": 5}], param="messages[0].name")
    yield from _of(CHAT, "messages", [{"role": "tool"}], param="messages[0].content")
    for arguments in ("{", "[]", "5", '{"a": NaN}', "[" * 2000):
        call = CALL | {"function": {"name": "f", "arguments": arguments}}
        where = "messages[0].tool_calls[0].function.arguments"
        yield from _of(CHAT, "messages", [{"role": "assistant", "tool_calls": [call]}], param=where)
    yield from _of(CHAT, "messages", [USER | {"content": "x" * 5000}])
    yield from _of(CHAT, "max_completion_tokens", 0, -1, "x", 10**6)
    yield from _of(CHAT, "logprobs", 5, "x")
    yield from _of(CHAT, "top_logprobs", 1, -1, 21)
    yield from _of(CHAT, "continue_final_message", True, "x", add_generation_prompt=True)
    yield from _of(CHAT, "chat_template_kwargs", 5, [], {"messages": []}, {"tools": []})
    yield from _of(CHAT, "chat_template", "{{ x }}")
    yield from _of(CHAT, "reasoning_effort", "low")
    yield from _of(CHAT, "modalities", ["audio"])
    # Tools. The model of these tests has no format of calls.
    yield from _of(CHAT, "tools", [TOOL], [TOOL, TOOL], 5, {}, [TOOL] * 257)
    yield from _of(CHAT, "tools", [5], param="tools[0]")
    yield from _of(CHAT, "tools", [{"type": "code"}, TOOL], [TOOL | {"type": "x"}], param="tools[0].type")
    yield from _of(CHAT, "tools", [TOOL | {"function": {"name": "a b"}}], param="tools[0].function.name")
    yield from _of(
        CHAT, "tools", [TOOL | {"function": {"name": "f", "parameters": 5}}], param="tools[0].function.parameters"
    )
    yield from _of(CHAT, "tool_choice", "auto", "required", "sometimes", 5)
    bad_tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "objct"}}}}}
    yield from _of(CHAT, "tool_choice", "required", tools=[bad_tool], param="tools")
    yield from _of(CHAT, "tool_choice", "required", tools=[TOOL], structured_outputs={"regex": "a"})
    yield from _of(CHAT, "tool_choice", {"type": "function", "function": {"name": "g"}}, tools=[TOOL])
    yield from _of(CHAT, "parallel_tool_calls", "x")
    # Responses.
    yield from _of(RESPONSES, "input", None, "", [], 5, {})
    yield from _of(RESPONSES, "input", [{"type": "image"}], [{"type": 5}], param="input[0].type")
    yield from _of(RESPONSES, "input", [{"content": "x"}], [{"role": "boss", "content": "x"}], param="input[0].role")
    yield from _of(RESPONSES, "input", [{"role": "user"}], param="input[0].content")
    yield from _of(RESPONSES, "input", [USER | {"content": [{"type": "input_image"}]}], param="input[0].content[0]")
    yield from _of(RESPONSES, "input", [{"type": "function_call", "name": "f"}], param="input[0].arguments")
    yield from _of(RESPONSES, "input", [{"type": "function_call_output", "call_id": "x"}], param="input[0].output")
    yield from _of(RESPONSES, "input", [{"type": "reasoning"}])
    yield from _of(RESPONSES, "input", [{"type": "function_call", "name": ""}], param="input[0].name")
    yield from _of(RESPONSES, "previous_response_id", "resp_1")
    yield from _of(RESPONSES, "reasoning", {"effort": "low"}, {"effort": None, "summary": "auto"}, "low")
    yield from _of(RESPONSES, "tool_choice", "required", {"type": "function", "name": "f"})
    yield from _of(RESPONSES, "conversation", "c")
    yield from _of(RESPONSES, "background", True)
    yield from _of(RESPONSES, "store", True)
    yield from _of(RESPONSES, "include", ["x"])
    yield from _of(RESPONSES, "truncation", "auto")
    yield from _of(RESPONSES, "prompt", {"id": "x"})
    yield from _of(RESPONSES, "max_output_tokens", 0, "x", 10**6)
    yield from _of(RESPONSES, "temperature", 3, "x")
    yield from _of(RESPONSES, "tools", [{"type": "web_search"}], param="tools[0].type")
    yield from _of(RESPONSES, "tools", [{"type": "function", "name": "f"}])
    yield from _of(RESPONSES, "metadata", {"x": 5}, 5)
    yield from _of(RESPONSES, "instructions", 5)
    # Tokens.
    yield from _of("/tokenize", "prompt", 5, None)
    yield from _of("/tokenize", "messages", [], 5)
    yield "/tokenize", {"messages": [USER]}, "prompt"
    yield from _of("/detokenize", "tokens", None, "x", 5)
    yield from _of("/detokenize", "tokens", [384], [-1], ["x"], [HUGE], param="tokens[0]")


CASES = list(_cases())
# Bodies that are no JSON objects, on every endpoint. NaN and infinities, which are no JSON, are named all the same.
RAW: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b"5", None),
    (b"null", None),
    (b'"x"', None),
    (b"\x00", None),
    (b"\xff\xfe", None),
    (b"{'a': 1}", None),
    (b'{"model": "\xff"}', None),
    (b'{"model": "\\ud800"}', None),
    (b'{"x":' + b"[" * 100_000, None),
    (b'{"x":' + b'{"y":' * 100_000, None),
    (b'{"temperature": NaN}', "temperature"),
    (b'{"top_p": Infinity}', "top_p"),
    (b'{"min_p": -Infinity}', "min_p"),
]


def test_there_are_many() -> None:
    assert len(CASES) > 300


@pytest.mark.slow
def test_every_kind_is_refused_by_name_and_no_node_works() -> None:
    # B64, B66, B81, B100, B105, B108: streaming or not, the same status and body.
    wrong: list[str] = []

    async def check(c: RouterCluster, path: str, data: bytes, param: str | None) -> Any:
        status, answer, headers = await c.post(path, data)
        error = answer.get("error", {})
        fine = (
            status == 400
            # The field, or the place within it.
            and (error["param"] == param if param is None else error["param"].startswith(param))
            and (param is None or (path == CHAT and param == "messages") or error["param"] in error["message"])
            and len(error["message"]) < 500
            and error["type"] == "invalid_request_error"
            and headers["X-Request-Id"]
        )
        if not fine:
            wrong.append(f"{path} {data[:120]!r}: {status} {error or answer}, expected {param}")
        return answer

    async def main() -> None:
        async with asyncio.timeout(60), router_cluster(pair([70, 71])) as c:
            for path, fields, param in CASES:
                body = VALID[path] | fields
                plain = await check(c, path, json.dumps(body).encode(), param)
                if "stream" not in fields and "stream_options" not in fields and path.startswith("/v1"):
                    assert await check(c, path, json.dumps(body | {"stream": True}).encode(), param) == plain
            for path in VALID:
                for data, param in RAW:
                    await check(c, path, data, param)
            assert not wrong, "\n".join(wrong)
            assert c.prefill[0].requests.empty()
            assert c.decode[0].requests.empty()
            for path in (CHAT, COMPLETION, RESPONSES):
                assert (await c.post(path, VALID[path]))[0] == 200
            assert "requests_running 0.0" in (await c.get("/metrics"))[1]

    uvloop.run(main())
