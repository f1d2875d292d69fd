"""What the official client's documentation shows, run against fake nodes: tools, responses, lists, streams."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
import uvloop
from pdserve_text.tokenizer import Tokenizer
from support.fake_node import FakeNode
from support.router_cluster import router_cluster
from support.tokenizers import EOS_ID
from support.tool_tokenizer import tool_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FILES = tool_tokenizer_files()
TOKENIZER = Tokenizer.from_files(FILES)
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}]
RESPONSE_TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS}]
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def served(answers: list[str], scenario: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
    """Nodes that give these answers, one a request, the last one for all that follow."""

    async def main() -> None:
        nodes = [FakeNode("prefill", FILES, max_model_len=1024), FakeNode("decode", FILES, max_model_len=1024)]
        for node in nodes:
            left = list(answers)

            def answer(request: Any, node: FakeNode = node, left: list[str] = left) -> None:
                text = left.pop(0) if len(left) > 1 else left[0]
                node.tokens = [*TOKENIZER.encode(text, add_special_tokens=False), EOS_ID]
                node.answer(request)

            node.on_request = answer
        async with (
            asyncio.timeout(30),
            router_cluster(nodes) as cluster,
            openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="any", max_retries=0) as client,
        ):
            await scenario(client)

    uvloop.run(main())


def test_function_calling() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        messages: Any = list(QUESTION)
        first = await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
        assert first.choices[0].finish_reason == "tool_calls"
        assert first.choices[0].message.tool_calls is not None
        call: Any = first.choices[0].message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "14 degrees"}]
        second = await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "It is 14 degrees."

    served([CALL, "It is 14 degrees."], scenario)


def test_streamed_function_calling() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(model="fake", messages=QUESTION, tools=TOOLS, stream=True)
        calls: dict[int, Any] = {}
        async for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or []:
                if call.index not in calls:
                    calls[call.index] = call
                else:
                    calls[call.index].function.arguments += call.function.arguments  # type: ignore[union-attr]
        assert json.loads(calls[0].function.arguments) == {"city": "Paris"}
        async with client.chat.completions.stream(model="fake", messages=QUESTION, tools=TOOLS) as events:
            done = [event async for event in events if event.type == "tool_calls.function.arguments.done"]
            final = await events.get_final_completion()
        assert [event.name for event in done] == ["get_weather"]
        assert final.choices[0].finish_reason == "tool_calls"

    served([CALL], scenario)


@pytest.mark.slow
def test_responses() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        response = await client.responses.create(
            model="fake", instructions="Talk like a pirate.", input="Are semicolons optional?"
        )
        assert response.output_text == "Arr, yes."
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
        stream = await client.responses.create(model="fake", input="Say it.", stream=True)
        events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Arr, yes."
        assert events[-1].type == "response.completed"
        async with client.responses.stream(model="fake", input="Say it.") as running:
            final = await running.get_final_response()
        assert final.output_text == "Arr, yes."

    served(["Arr, yes."], scenario)


def test_responses_with_functions() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        items: Any = list(QUESTION)
        response = await client.responses.create(model="fake", input=items, tools=RESPONSE_TOOLS)
        items += response.output
        for item in response.output:
            if item.type == "function_call":
                assert json.loads(item.arguments) == {"city": "Paris"}
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": "14 degrees"})
        assert len(items) == 3
        response = await client.responses.create(model="fake", input=items, tools=RESPONSE_TOOLS)
        assert response.output_text == "It is 14 degrees."

    served([CALL, "It is 14 degrees."], scenario)


def test_lists_of_prompts_and_choices() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        texts = await client.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=20, echo=True)
        assert [choice.text for choice in texts.choices] == ["a yes", "a yes", "b yes", "b yes"]
        chat = await client.chat.completions.create(model="fake", messages=QUESTION, n=3)
        assert [choice.message.content for choice in chat.choices] == [" yes"] * 3

    served([" yes"], scenario)


def test_reasoning() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        chat = await client.chat.completions.create(model="fake", messages=QUESTION)
        assert chat.choices[0].message.content == "Yes."
        assert chat.choices[0].message.reasoning_content == "hm"  # type: ignore[attr-defined]

    served(["<think>\nhm\n</think>\n\nYes."], scenario)
