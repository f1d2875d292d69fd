"""Several prompts and several choices in one request; echo, stop strings in the output, special tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from msgspec.structs import replace
from pdserve_protocol.outputs import Aborted, Failed, Finished, HandedOver
from pdserve_router import validate
from pdserve_text.tokenizer import Tokenizer
from support.fake_node import PREFILL_PROOF, TRANSFER_PROOF, FakeNode
from support.router_cluster import DEADLINE_S, FILES, pair, parse_events, router_cluster
from support.tokenizers import EOS_ID

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve_protocol.requests import AddRequest
    from support.router_cluster import RouterCluster

TOKENIZER = Tokenizer.from_files(FILES)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(
    nodes: Callable[[], list[FakeNode]], scenario: Callable[[RouterCluster], Awaitable[None]], **config: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), router_cluster(nodes(), **config) as cluster:
            await scenario(cluster)

    uvloop.run(main())


def telling_nodes() -> list[FakeNode]:
    """Nodes whose answer tells the prompt and the choice that it was given for; later choices are longer."""
    nodes = pair()
    for node in nodes:

        def answer(request: AddRequest, node: FakeNode = node) -> None:
            text = TOKENIZER.decode(request.prompt_token_ids) + "0123456789"[: request.choice + 1]
            node.tokens = [*ids(text), EOS_ID]
            node.answer(request)

        node.on_request = answer
    return nodes


def texts(choices: list[Any]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for choice in choices:
        part = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        joined[choice["index"]] = joined.get(choice["index"], "") + part
    return joined


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_with_several_choices(as_ids: bool) -> None:
    # B77, B97: index = prompt * n + sample; each as if it were alone.
    prompts = ["one ", "two ", "three "]

    async def scenario(c: RouterCluster) -> None:
        body: dict[str, Any] = {"prompt": [ids(p) for p in prompts] if as_ids else prompts, "n": 2, "max_tokens": 50}
        expected = {i: prompts[i // 2] + "01"[: i % 2 + 1] for i in range(6)}
        _, answer, _ = await c.post(COMPLETION, body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert {choice["index"]: choice["text"] for choice in answer["choices"]} == expected
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
        assert [choice["pdserve"]["mode"] for choice in answer["choices"]] == ["disaggregated", "forked"] * 3
        assert "pdserve" not in answer
        assert answer["usage"]["prompt_tokens"] == sum(len(ids(p)) for p in prompts)
        assert answer["usage"]["completion_tokens"] == sum(len(ids(text)) + 1 for text in expected.values())
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * PREFILL_PROOF.cached_tokens

        events = await c.stream(COMPLETION, body | {"stream_options": {"include_usage": True}})
        choices = [choice for event in events[:-1] for choice in event["choices"]]
        assert texts(choices) == expected
        assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == list(range(6))
        assert (events[-1], events[-2]["choices"], events[-2]["usage"]) == ("[DONE]", [], answer["usage"])
        for prompt in prompts:
            _, alone, _ = await c.post(COMPLETION, {"prompt": prompt, "max_tokens": 50})
            assert alone["choices"][0]["text"] == prompt + "0"

    run(telling_nodes, scenario)


def test_choices_of_a_chat() -> None:
    async def scenario(c: RouterCluster) -> None:
        _, answer, _ = await c.post(CHAT, HELLO | {"n": 3, "best_of": 3, "max_tokens": 60, "logprobs": True})
        contents = [choice["message"]["content"] for choice in answer["choices"]]
        assert [content[-1] for content in contents] == ["0", "1", "2"]
        lengths = [len(choice["logprobs"]["content"]) for choice in answer["choices"]]
        assert lengths == [len(ids(content)) for content in contents]
        events = await c.stream(CHAT, HELLO | {"n": 3, "max_tokens": 60})
        choices = [choice for event in events[:-1] for choice in event["choices"]]
        assert texts(choices) == dict(enumerate(contents))
        assert sum("role" in choice["delta"] for choice in choices) == 3
        # Each at its own length.
        _, short, _ = await c.post(COMPLETION, {"prompt": "x", "n": 2, "max_tokens": 3})
        assert [choice["finish_reason"] for choice in short["choices"]] == ["stop", "length"]

    run(telling_nodes, scenario)


@pytest.mark.parametrize("exact", [True, False])
def test_choices_go_on_from_the_prompt_of_the_first_one_when_it_has_arrived(exact: bool) -> None:
    # Where the KV is not what the decode node would have computed, the prompt goes through both nodes again.
    async def scenario(c: RouterCluster) -> None:
        request = asyncio.create_task(c.post(COMPLETION, {"prompt": "x", "n": 3, "seed": 5, "max_tokens": 3}))
        half = await asyncio.wait_for(c.decode[0].requests.get(), DEADLINE_S)
        prefill_half = await asyncio.wait_for(c.prefill[0].requests.get(), DEADLINE_S)
        await c.get("/health")
        assert all(node.requests.empty() for node in (*c.prefill, *c.decode))
        c.prefill[0].say(prefill_half, 0, ids("a"), prefill=PREFILL_PROOF)
        await c.until("/metrics", lambda body: "time_to_first_token_seconds_count 1.0" in body)
        assert c.decode[0].requests.empty()
        c.decode[0].say(half, 0, ids("a") + ids("b"), transfer=replace(TRANSFER_PROOF, exact=exact))
        others = [await asyncio.wait_for(c.decode[0].requests.get(), DEADLINE_S) for _ in range(2)]
        assert [half.choice, *(other.choice for other in others)] == [0, 1, 2]
        assert {other.sampling.seed for other in (half, *others)} == {5}
        assert len({other.id for other in (half, *others)}) == 3
        assert {other.receive_from is None for other in others} == {exact}
        if not exact:
            again = [await asyncio.wait_for(c.prefill[0].requests.get(), DEADLINE_S) for _ in others]
            assert [half.id for half in again] == [other.id for other in others]
        assert c.prefill[0].requests.empty()
        for other in others:
            c.decode[0].say(other, 0, ids("ab")[:1] + ids("b"), end=Finished(reason="length"), prefill=PREFILL_PROOF)
        c.prefill[0].say(prefill_half, 1, end=HandedOver())
        c.decode[0].say(half, 2, ids("c"), end=Finished(reason="length"))
        status, answer, _ = await request
        assert (status, len(answer["choices"])) == (200, 3)
        assert c.prefill[1].requests.empty()
        assert c.decode[1].requests.empty()

    run(lambda: [*pair(manual=True), *pair(manual=True)], scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_one_choice_that_fails_ends_the_request_and_frees_the_others(stream: bool) -> None:
    async def scenario(c: RouterCluster) -> None:
        body = {"prompt": ["x", "y"], "max_tokens": 9, "stream": stream}
        request = asyncio.create_task(c.post(COMPLETION, body))
        first, second = [await asyncio.wait_for(c.decode[0].requests.get(), DEADLINE_S) for _ in range(2)]
        c.decode[0].say(first, 0, end=Failed(code="overloaded", message="full"))
        status, answer, headers = await request
        # B103
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "overloaded", "1")
        assert await asyncio.wait_for(c.decode[0].aborted.get(), DEADLINE_S) == second.id

    run(lambda: pair(manual=True), scenario)


def test_more_prompt_tokens_than_a_node_ever_takes_are_refused_before_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validate, "MAX_OPEN_PROMPT_TOKENS", 12)

    async def scenario(c: RouterCluster) -> None:
        for body, param in (({"prompt": [7] * 7, "n": 2}, "n"), ({"prompt": [[7] * 6, [7] * 7]}, "prompt")):
            status, answer, _ = await c.post(COMPLETION, body)
            assert (status, answer["error"]["param"]) == (400, param)
            assert "at most 12" in answer["error"]["message"]
        assert c.decode[0].requests.empty()
        assert (await c.post(COMPLETION, {"prompt": [7] * 6, "n": 2}))[0] == 200

    run(lambda: [FakeNode("decode", FILES, tokens=ids("ab"))], scenario)


def test_a_client_that_goes_away_frees_all_choices() -> None:
    async def scenario(c: RouterCluster) -> None:
        request = asyncio.create_task(c.post(COMPLETION, {"prompt": ["x", "y", "z"], "max_tokens": 9}))
        halves = [await asyncio.wait_for(c.decode[0].requests.get(), DEADLINE_S) for _ in range(3)]
        request.cancel()
        aborted = {await asyncio.wait_for(c.decode[0].aborted.get(), DEADLINE_S) for _ in range(3)}
        assert aborted == {half.id for half in halves}

    run(lambda: pair(manual=True), scenario)


def test_prompts_without_a_seed_draw_one_each() -> None:
    async def scenario(c: RouterCluster) -> None:
        await c.post(COMPLETION, {"prompt": ["x"] * 3, "max_tokens": 2})
        assert len({(await c.decode[0].requests.get()).sampling.seed for _ in range(3)}) == 3

    run(lambda: pair(ids("ab")), scenario)


def test_echo() -> None:
    async def scenario(c: RouterCluster) -> None:
        for prompt in ("say the", ids("say the")):
            body = {"prompt": prompt, "echo": True, "max_tokens": 2, "n": 2}
            _, answer, _ = await c.post(COMPLETION, body)
            assert [choice["text"] for choice in answer["choices"]] == ["say theab"] * 2
            events = await c.stream(COMPLETION, body)
            choices = [choice for event in events[:-1] for choice in event["choices"]]
            assert texts(choices) == {0: "say theab", 1: "say theab"}

    run(lambda: pair([*ids("a"), *ids("b")]), scenario)


def test_stop_strings_and_tokens_may_be_included() -> None:
    # B92: text, tokens and log probabilities end at the same place.
    async def scenario(c: RouterCluster) -> None:
        for include, text, tokens in ((False, "a", ["a"]), (True, "abc", ["a", "b", "c"])):
            body = {"prompt": "x", "max_tokens": 9, "stop": "bc", "logprobs": 0, "include_stop_str_in_output": include}
            _, answer, _ = await c.post(COMPLETION, body)
            choice = answer["choices"][0]
            assert (choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]) == (text, tokens, "stop")
            events = await c.stream(COMPLETION, body)
            assert texts([ch for event in events[:-1] for ch in event["choices"]]) == {0: text}
            token = {"prompt": "x", "stop_token_ids": ids("c"), "include_stop_str_in_output": include}
            _, answer, _ = await c.post(COMPLETION, token)
            assert answer["choices"][0]["text"] == ("abc" if include else "ab")

    run(lambda: pair([*ids("a"), *ids("b"), *ids("c"), *ids("d")]), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_a_stop_string_ends_is_aborted_while_the_others_go_on(stream: bool) -> None:
    async def scenario(c: RouterCluster) -> None:
        body = {"prompt": ["x", "y"], "max_tokens": 3, "stop": "b", "ignore_eos": True, "stream": stream}
        request = asyncio.create_task(c.session.post(c.url + COMPLETION, json=body))
        first, second = [await asyncio.wait_for(c.decode[0].requests.get(), DEADLINE_S) for _ in range(2)]
        c.decode[0].say(second, 0, ids("c"))
        c.decode[0].say(first, 0, ids("a") + ids("b"))
        assert await asyncio.wait_for(c.decode[0].aborted.get(), DEADLINE_S) == first.id
        c.decode[0].say(first, 2, end=Aborted())
        c.decode[0].say(second, 1, ids("cc"), end=Finished(reason="length"))
        answer = await request
        if stream:
            events = parse_events(await answer.read())
            choices = [choice for event in events[:-1] for choice in event["choices"]]
        else:
            choices = (await answer.json())["choices"]
        assert texts(choices) == {0: "a", 1: "ccc"}
        assert {ch["index"]: ch["finish_reason"] for ch in choices if ch["finish_reason"]} == {0: "stop", 1: "length"}
        assert c.decode[0].aborted.empty()

    run(lambda: [FakeNode("decode", FILES, manual=True)], scenario)


def test_special_tokens_may_be_shown() -> None:
    async def scenario(c: RouterCluster) -> None:
        for skip, text in ((True, "ab"), (False, "a<|im_start|>b")):
            _, answer, _ = await c.post(COMPLETION, {"prompt": "x", "max_tokens": 3, "skip_special_tokens": skip})
            assert answer["choices"][0]["text"] == text

    run(lambda: pair([*ids("a"), 1, *ids("b")]), scenario)


def test_tokenize_and_detokenize() -> None:
    async def scenario(c: RouterCluster) -> None:
        text = "hello é <|im_end|>"
        _, answer, _ = await c.post("/tokenize", {"prompt": text, "return_token_strs": True})
        assert answer["tokens"] == ids(text)
        assert (answer["count"], answer["max_model_len"]) == (len(ids(text)), 256)
        assert answer["token_strs"][-1] == "<|im_end|>"
        _, back, _ = await c.post("/detokenize", {"tokens": answer["tokens"]})
        assert back == {"prompt": text}
        _, chat, _ = await c.post("/tokenize", HELLO)
        await c.post(CHAT, HELLO)
        assert chat["tokens"] == (await c.prefill[0].requests.get()).prompt_token_ids
        _, bare, _ = await c.post("/tokenize", HELLO | {"add_generation_prompt": False})
        assert chat["tokens"][: bare["count"]] == bare["tokens"] != chat["tokens"]
        assert (await c.post("/tokenize", {"prompt": ""}))[1]["tokens"] == []

    run(lambda: pair(ids("a")), scenario)


def test_a_message_to_be_continued() -> None:
    async def scenario(c: RouterCluster) -> None:
        messages = [*HELLO["messages"], {"role": "assistant", "content": "The answer"}]
        await c.post(CHAT, {"messages": messages, "continue_final_message": True, "add_generation_prompt": False})
        prompt = TOKENIZER.decode((await c.prefill[0].requests.get()).prompt_token_ids, skip_special_tokens=False)
        assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe answer"

    run(lambda: pair(ids("a")), scenario)
