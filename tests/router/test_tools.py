"""Function calls and reasoning over the API: plain as streamed, whatever the model says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from hypothesis import given, settings, strategies as st
from pdserve_text.tokenizer import Tokenizer
from support.fake_node import FakeNode
from support.router_cluster import RouterCluster, router_cluster
from support.tokenizers import EOS_ID
from support.tool_tokenizer import tool_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FILES = tool_tokenizer_files()
TOKENIZER = Tokenizer.from_files(FILES)
CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Rain?"}], "tools": [WEATHER], "max_tokens": 150}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def says(text: str) -> list[FakeNode]:
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), EOS_ID]
    return [FakeNode(role, FILES, tokens=tokens, max_model_len=1024) for role in ("prefill", "decode")]  # type: ignore[arg-type]


def run(
    nodes: Callable[[], list[FakeNode]], scenario: Callable[[RouterCluster], Awaitable[None]], **config: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), router_cluster(nodes(), **config) as cluster:
            await scenario(cluster)

    uvloop.run(main())


def assembled(events: list[Any], index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream: message, finish reason and log probabilities of one choice."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason, logprobs = None, []
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function"
                    message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
            logprobs += choice["logprobs"]["content"] if choice["logprobs"] else []
    return {"message": message, "reason": reason, "logprobs": logprobs}


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [{"id": c["id"], **c["function"]} for c in message.get("tool_calls", [])]
    return {
        "message": {
            "content": message["content"] or "",
            "reasoning_content": message.get("reasoning_content", ""),
            "tool_calls": calls,
        },
        "reason": choice["finish_reason"],
        "logprobs": choice["logprobs"]["content"] if choice["logprobs"] else [],
    }


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    for call in answer["message"]["tool_calls"]:
        assert call.pop("id").startswith("call_")
    return answer


def test_a_call_and_its_result() -> None:
    async def scenario(c: RouterCluster) -> None:
        _, answer, _ = await c.post(CHAT, ASK)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Paris"}'})
        prompt = TOKENIZER.decode((await c.prefill[0].requests.get()).prompt_token_ids, skip_special_tokens=False)
        assert '"name": "weather"' in prompt
        # The result goes back, and the template sees the arguments as a value.
        result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        await c.post(CHAT, ASK | {"messages": [*ASK["messages"], choice["message"], result]})
        prompt = TOKENIZER.decode((await c.prefill[0].requests.get()).prompt_token_ids, skip_special_tokens=False)
        assert "<tool_call>weather Paris</tool_call>" in prompt
        assert "<|im_start|>tool\nrain<|im_end|>" in prompt
        # With "none" the model hears of no tools, and what it says is content.
        _, answer, _ = await c.post(CHAT, ASK | {"tool_choice": "none"})
        assert answer["choices"][0]["message"]["content"] == CALL
        prompt = TOKENIZER.decode((await c.prefill[0].requests.get()).prompt_token_ids, skip_special_tokens=False)
        assert "Tools:" not in prompt

    run(lambda: says(CALL), scenario)


def test_a_name_that_the_model_made_up_goes_back() -> None:
    async def scenario(c: RouterCluster) -> None:
        _, answer, _ = await c.post(CHAT, ASK)
        message = answer["choices"][0]["message"]
        call = message["tool_calls"][0]
        assert call["function"]["name"] == "get weather"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "no such tool"}
        status, answer, _ = await c.post(CHAT, ASK | {"messages": [*ASK["messages"], message, result]})
        assert status == 200, answer
        body = {"input": "Rain?", "tools": [{"type": "function", **WEATHER["function"]}]}
        _, answer, _ = await c.post("/v1/responses", body)
        (call,) = answer["output"]
        items = [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "no such tool"}]
        status, answer, _ = await c.post("/v1/responses", body | {"input": items})
        assert status == 200, answer

    run(lambda: says(CALL.replace("weather", "get weather")), scenario)


def test_the_name_comes_before_the_arguments_and_these_come_in_parts() -> None:
    async def scenario(c: RouterCluster) -> None:
        events = await c.stream(CHAT, ASK)
        deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
        calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert calls[0]["function"] == {"name": "weather", "arguments": ""}
        assert all("name" not in call["function"] and "id" not in call for call in calls[1:])
        assert len(calls) > 3
        assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Paris"}'
        assert not any(delta.get("content") for delta in deltas)

    run(lambda: says(CALL), scenario)


def test_what_is_held_back_comes_out_when_a_stop_string_ends_the_answer() -> None:
    # B95
    async def scenario(c: RouterCluster) -> None:
        body = ASK | {"stop": ["STOP"]}
        _, answer, _ = await c.post(CHAT, body)
        assert answer["choices"][0]["message"]["content"] == 'a <tool_call>{"na'
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert assembled(await c.stream(CHAT, body))["message"]["content"] == 'a <tool_call>{"na'
        cut = await c.stream(CHAT, ASK | {"max_tokens": 6})
        assert assembled(cut)["reason"] == "length"
        assert assembled(cut)["message"]["content"].startswith("a <")

    run(lambda: says('a <tool_call>{"naSTOP'), scenario)


def test_each_choice_has_a_parser_of_its_own() -> None:
    # B97
    def nodes() -> list[FakeNode]:
        nodes = says("")
        for node in nodes:

            def answer(request: Any, node: FakeNode = node) -> None:
                text = ("<think>one</think>Yes.", CALL, "<tool_call>not")[request.choice]
                node.tokens = [*TOKENIZER.encode(text, add_special_tokens=False), EOS_ID]
                node.answer(request)

            node.on_request = answer
        return nodes

    async def scenario(c: RouterCluster) -> None:
        _, answer, _ = await c.post(CHAT, ASK | {"n": 3})
        events = await c.stream(CHAT, ASK | {"n": 3})
        for i, choice in enumerate(answer["choices"]):
            assert without_ids(assembled(events, i)) == without_ids(plain(choice))
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        assert reasons == ["stop", "tool_calls", "stop"]
        assert answer["choices"][0]["message"]["reasoning_content"] == "one"
        assert answer["choices"][2]["message"]["content"] == "<tool_call>not"

    run(nodes, scenario)


def test_reasoning_follows_the_prompt() -> None:
    async def scenario(c: RouterCluster) -> None:
        body = {"messages": ASK["messages"], "max_tokens": 100}
        _, answer, _ = await c.post(CHAT, body)
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
        # A template that is told not to think closes the thinking itself; what comes is content then.
        _, answer, _ = await c.post(CHAT, body | {"chat_template_kwargs": {"enable_thinking": False}})
        prompt = [await c.prefill[0].requests.get() for _ in range(2)][1].prompt_token_ids
        assert TOKENIZER.decode(prompt).endswith("<think>\n\n</think>\n\n")

    run(lambda: says("<think>\nhm\n</think>\n\nYes."), scenario)


def test_parsers_are_chosen_by_flags() -> None:
    async def no_parser(c: RouterCluster) -> None:
        status, answer, _ = await c.post(CHAT, ASK)
        assert (status, answer["error"]["param"]) == (400, "tools")
        _, answer, _ = await c.post(CHAT, {"messages": ASK["messages"], "max_tokens": 100})
        assert answer["choices"][0]["message"]["content"] == "hm</think>Yes."

    async def named(c: RouterCluster) -> None:
        _, answer, _ = await c.post(CHAT, ASK)
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")

    run(lambda: says("hm</think>Yes."), no_parser, tool_call_parser="none", reasoning_parser="none")
    run(lambda: says("hm</think>Yes."), named, tool_call_parser="mistral", reasoning_parser="deepseek_r1")


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_that_the_model_would_not_hear_of(choice: Any) -> None:
    async def scenario(c: RouterCluster) -> None:
        for path, body in (
            (CHAT, ASK),
            ("/tokenize", {"messages": ASK["messages"], "tools": [WEATHER]}),
            ("/v1/responses", {"input": "Rain?", "tools": [{"type": "function", **WEATHER["function"]}]}),
        ):
            extra = {} if path == "/tokenize" else {"tool_choice": choice if path == CHAT else "required"}
            status, answer, _ = await c.post(path, body | extra)
            error = answer["error"]
            assert (status, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
        assert c.prefill[0].requests.empty()
        assert (await c.post(CHAT, ASK | {"tool_choice": "none"}))[0] == 200

    files = tool_tokenizer_files("{% for message in messages %}{{ message.content }}{% endfor %}<tool_call>")

    def nodes() -> list[FakeNode]:
        return [FakeNode(role, files, tokens=[EOS_ID], max_model_len=1024) for role in ("prefill", "decode")]  # type: ignore[arg-type]

    run(nodes, scenario, tool_call_parser="hermes")


# Some of these are several tokens, and some tokens are parts of characters.
WORDS = [
    *("<tool_call>", "</tool_call>", '{"name": "weather", "arguments": ', '{"city": "é"}', "}", CALL),
    *("<think>", "</think>", "\n", "the ", "東京", "STOP", "ST", "\U0001f468\u200d\U0001f469"),
]


@pytest.mark.slow
def test_streamed_is_plain_over_many_texts() -> None:
    # 300 texts: tool calls, reasoning, stop strings, log probabilities, characters of several tokens, every max_tokens.
    texts: list[tuple[str, int]] = []

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(st.lists(st.sampled_from(WORDS), max_size=6).map("".join), st.integers(1, 80))
    def collect(text: str, max_tokens: int) -> None:
        texts.append((text, max_tokens))

    collect()

    async def scenario(c: RouterCluster) -> None:
        for number, (text, max_tokens) in enumerate(texts):
            tokens = [*TOKENIZER.encode(text, add_special_tokens=False), EOS_ID]
            for node in (*c.prefill, *c.decode):
                node.tokens = tokens
            body = ASK | {"stop": ["STOP"], "logprobs": True, "max_tokens": max_tokens, "temperature": 0}
            _, answer, _ = await c.post(CHAT, body)
            events = await c.stream(CHAT, body)
            expected = without_ids(plain(answer["choices"][0]))
            assert without_ids(assembled(events)) == expected, text
            if number % 5:
                continue
            completion = {"prompt": "x", "stop": ["STOP"], "logprobs": 1, "max_tokens": max_tokens}
            _, answer, _ = await c.post("/v1/completions", completion)
            events = await c.stream("/v1/completions", completion)
            choices = [choice for event in events[:-1] for choice in event["choices"]]
            assert "".join(choice["text"] for choice in choices) == answer["choices"][0]["text"]
            pieces = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            for name, values in answer["choices"][0]["logprobs"].items():
                assert [value for piece in pieces for value in piece[name]] == values

    run(lambda: says(""), scenario)
    assert len(texts) == 300
