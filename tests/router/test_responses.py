"""/v1/responses: answers and events in the documented order."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import uvloop
from pdserve_protocol.outputs import Failed
from pdserve_text.tokenizer import Tokenizer
from support.fake_node import FakeNode
from support.router_cluster import DEADLINE_S, RouterCluster, router_cluster
from support.tokenizers import EOS_ID
from support.tool_tokenizer import tool_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FILES = tool_tokenizer_files()
TOKENIZER = Tokenizer.from_files(FILES)
PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(text: str, scenario: Callable[[RouterCluster], Awaitable[None]], *, manual: bool = False) -> None:
    async def main() -> None:
        tokens = [*ids(text), EOS_ID]
        options: dict[str, Any] = {"tokens": tokens, "manual": manual, "max_model_len": 1024}
        nodes = [FakeNode("prefill", FILES, **options), FakeNode("decode", FILES, **options)]
        async with asyncio.timeout(30), router_cluster(nodes) as cluster:
            await scenario(cluster)

    uvloop.run(main())


async def events_of(c: RouterCluster, body: dict[str, Any]) -> list[Any]:
    async with c.session.post(c.url + PATH, json=body | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        blocks = (await answer.text()).split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def test_an_answer() -> None:
    async def scenario(c: RouterCluster) -> None:
        body = {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("hel", "lo")]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
                {"role": "user", "content": "again"},
            ],
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "max_output_tokens": 50,
            "store": False,
        }
        status, answer, _ = await c.post(PATH, body)
        assert status == 200
        assert answer["object"] == "response"
        assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
        (item,) = answer["output"]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
        assert item["content"] == [{"type": "output_text", "text": "Yes é.", "annotations": [], "logprobs": []}]
        request = await c.prefill[0].requests.get()
        num_prompt = len(request.prompt_token_ids)
        assert answer["usage"] == {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 2},
            "output_tokens": len(ids("Yes é.")) + 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + len(ids("Yes é.")) + 1,
        }
        assert (answer["instructions"], answer["metadata"], answer["store"]) == ("Be brief.", {"a": "b"}, False)
        assert answer["pdserve"]["mode"] == "disaggregated"
        prompt = TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False)
        assert prompt == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
            "<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
        )

    run("Yes é.", scenario)


def test_the_request_is_repeated() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}

    async def scenario(c: RouterCluster) -> None:
        for text, echo in (
            (None, {"format": {"type": "text"}}),
            ({"verbosity": "low"}, {"format": {"type": "text"}, "verbosity": "low"}),
            ({"format": {"type": "json_object"}}, {"format": {"type": "json_object"}}),
            ({"format": form, "verbosity": "low"}, {"format": form, "verbosity": "low"}),
        ):
            assert (await c.post(PATH, {"input": "hello", "text": text}))[1]["text"] == echo
        for more in ({}, {"tools": []}, {"reasoning": {}}, {"reasoning": {"effort": None, "summary": None}}):
            status, answer, _ = await c.post(PATH, {"input": "hello", "tool_choice": "auto"} | more)
            assert (status, answer.get("tool_choice")) == (200, "auto")

    run("{}", scenario)


def test_events_of_a_text() -> None:
    async def scenario(c: RouterCluster) -> None:
        events = await events_of(c, {"input": "hello"})
        kinds = [event["type"] for event in events]
        assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        done = next(event for event in events if event["type"] == "response.output_text.done")
        assert deltas == done["text"] == "Yes é."
        assert len({event["item_id"] for event in events if "item_id" in event}) == 1
        _, plain, _ = await c.post(PATH, {"input": "hello"})
        streamed = events[-1]["response"]
        assert [item["content"] for item in streamed["output"]] == [item["content"] for item in plain["output"]]
        assert streamed["usage"] == plain["usage"]
        assert streamed["status"] == "completed"
        cut = await events_of(c, {"input": "hello", "max_output_tokens": 1})
        assert cut[-1]["type"] == "response.incomplete"
        assert cut[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}

    run("Yes é.", scenario)


def test_reasoning_and_calls_are_items_of_their_own() -> None:
    async def scenario(c: RouterCluster) -> None:
        body = {"input": "hello", "tools": [TOOL], "max_output_tokens": 150}
        _, plain, _ = await c.post(PATH, body)
        assert [item["type"] for item in plain["output"]] == ["reasoning", "message", "function_call"]
        assert plain["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
        call = plain["output"][2]
        assert (call["name"], call["arguments"], call["status"]) == ("weather", '{"city": "Paris"}', "completed")
        events = await events_of(c, body)
        assert len({item["id"] for item in events[-1]["response"]["output"]}) == 3
        for mine, theirs in zip(events[-1]["response"]["output"], plain["output"], strict=True):
            ignored = {"id": "", "call_id": ""}
            assert mine | ignored == theirs | ignored
        kinds = [event["type"] for event in events]
        arguments = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
        assert "".join(arguments) == call["arguments"]
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        assert [e["output_index"] for e in events if e["type"] == "response.output_item.added"] == [0, 1, 2]
        # The next turn.
        items = [{"role": "user", "content": "hello"}, *plain["output"]]
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "rain"})
        assert (await c.post(PATH, body | {"input": items, "max_output_tokens": 9}))[0] == 200
        prompts = [(await c.prefill[0].requests.get()).prompt_token_ids for _ in range(3)]
        text = TOKENIZER.decode(prompts[-1], skip_special_tokens=False)
        assert "assistant\nYes.<tool_call>weather Paris</tool_call><|im_end|>\n<|im_start|>tool\nrain" in text

    run("<think>hm</think>\n\nYes. " + CALL, scenario)


def test_a_failure_in_mid_stream() -> None:
    # B83
    async def scenario(c: RouterCluster) -> None:
        request = asyncio.create_task(events_of(c, {"input": "hello"}))
        half = await asyncio.wait_for(c.prefill[0].requests.get(), DEADLINE_S)
        c.prefill[0].say(half, 0, ids("a"))
        await asyncio.wait_for(c.decode[0].requests.get(), DEADLINE_S)
        await c.until("/metrics", lambda body: "time_to_first_token_seconds_count 1.0" in body)
        c.decode[0].say(half, 1, end=Failed(code="internal", message="a fault"))
        events = await request
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "internal"
        assert events[-1]["response"]["status"] == "failed"

    run("", scenario, manual=True)
