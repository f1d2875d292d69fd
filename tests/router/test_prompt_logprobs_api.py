"""Log probabilities of prompts in answers: prompt_logprobs as vLLM shapes it, and echo with logprobs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from msgspec.structs import replace
from pdserve_protocol.outputs import Finished, HandedOver, PromptLogprobs, RequestOutput, TokenLogprobs
from pdserve_router.errors import NodeFailed
from pdserve_router.lifecycle import AttemptLife, Half
from pdserve_router.prompt_scores import text_offsets
from pdserve_text.tokenizer import Tokenizer
from support.router_cluster import DEADLINE_S, FILES, pair, router_cluster
from support.tokenizers import BOS_ID, EOS_ID

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.fake_node import FakeNode
    from support.router_cluster import RouterCluster

TOKENIZER = Tokenizer.from_files(FILES)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = "the é hat"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(nodes: Callable[[], list[FakeNode]], scenario: Callable[[RouterCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), router_cluster(nodes()) as cluster:
            await scenario(cluster)

    uvloop.run(main())


def answering() -> list[FakeNode]:
    return pair([*ids("a"), *ids(" the"), *ids("b"), EOS_ID])


def pieces(token_ids: list[int]) -> list[str]:
    return [TOKENIZER.token_bytes(i).decode("utf-8", "replace") for i in token_ids]


def test_prompt_logprobs_of_both_endpoints() -> None:
    async def scenario(c: RouterCluster) -> None:
        prompt = ids(PROMPT)
        _, answer, _ = await c.post(COMPLETION, {"prompt": PROMPT, "max_tokens": 9, "prompt_logprobs": 2, "n": 2})
        first, second = (choice["prompt_logprobs"] for choice in answer["choices"])
        assert first == second
        assert first[0] is None
        assert len(first) == len(prompt) == answer["usage"]["prompt_tokens"]
        for token_id, entry in zip(prompt[1:], first[1:], strict=True):
            (text,) = pieces([token_id])
            assert entry[str(token_id)] == {"logprob": -0.5, "rank": 1, "decoded_token": text}
            assert entry[str(token_id + 1)]["rank"] == 2
            assert len(entry) == 2
        assert c.prefill[0].requests.get_nowait().sampling.prompt_logprobs == 2
        asked = [c.decode[0].requests.get_nowait() for _ in range(2)]
        assert [(request.choice, request.sampling.prompt_logprobs) for request in asked] == [(0, 2), (1, None)]

        messages = [{"role": "user", "content": PROMPT}]
        _, answer, _ = await c.post(CHAT, {"messages": messages, "max_tokens": 3, "prompt_logprobs": 0})
        scores = answer["prompt_logprobs"]
        assert [score and len(score) for score in scores] == [None] + [1] * (answer["usage"]["prompt_tokens"] - 1)
        _, answer, _ = await c.post(CHAT, {"messages": messages, "max_tokens": 3})
        assert "prompt_logprobs" not in answer
        # A prompt of one token, and an output of one token, which needs no decode node.
        _, answer, _ = await c.post(COMPLETION, {"prompt": [5], "max_tokens": 1, "prompt_logprobs": 1})
        assert answer["choices"][0]["prompt_logprobs"] == [None]

    run(answering, scenario)


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_echo_with_logprobs_has_entries_for_prompt_and_output(max_tokens: int, num_top: int) -> None:
    # B81: the arrays are as long as prompt and output together, the first entry is null.
    async def scenario(c: RouterCluster) -> None:
        prompt, output = ids(PROMPT), [*ids("a"), *ids(" the"), *ids("b")][:max_tokens]
        body: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": num_top, "max_tokens": max_tokens}
        _, answer, _ = await c.post(COMPLETION, body)
        (choice,) = answer["choices"]
        logprobs = choice["logprobs"]
        count = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
        assert count == len(prompt) + len(output)
        assert [len(values) for values in logprobs.values()] == [count] * 4
        assert logprobs["token_logprobs"] == [None] + [-0.5] * (count - 1)
        assert logprobs["top_logprobs"][0] is None
        assert {len(top) for top in logprobs["top_logprobs"][1:]} == {num_top or 1}
        assert "prompt_logprobs" not in choice
        text = choice["text"]
        assert text == PROMPT + TOKENIZER.decode(output)
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert text[offset : offset + len(token)] == token

        events = await c.stream(COMPLETION, body)
        choices = [event["choices"][0] for event in events[:-1]]
        assert "".join(part["text"] for part in choices) == text
        streamed = [part["logprobs"] for part in choices if part["logprobs"]]
        assert {key: [x for part in streamed for x in part[key]] for key in logprobs} == logprobs
        # The prompt comes alone, before the output.
        assert choices[0]["text"] == PROMPT

    run(answering, scenario)


def test_each_prompt_and_choice_is_echoed() -> None:
    async def scenario(c: RouterCluster) -> None:
        body = {"prompt": [[5, 6, 7], ids("a the")], "n": 2, "echo": True, "logprobs": 0, "max_tokens": 2}
        _, answer, _ = await c.post(COMPLETION, body)
        lengths = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
        assert lengths == [5, 5, len(ids("a the")) + 2, len(ids("a the")) + 2]
        assert all(choice["logprobs"]["token_logprobs"][0] is None for choice in answer["choices"])

    run(answering, scenario)


def test_a_prompt_in_chunks_and_a_decode_node_that_is_heard_first() -> None:
    async def scenario(c: RouterCluster) -> None:
        request = asyncio.create_task(
            c.post(COMPLETION, {"prompt": [5, 6, 7, 8], "max_tokens": 2, "echo": True, "logprobs": 0})
        )
        async with asyncio.timeout(DEADLINE_S):
            prefill, decode = await c.prefill[0].requests.get(), await c.decode[0].requests.get()
        node = c.prefill[0]
        early = RequestOutput(id=prefill.id, position=0, prompt_logprobs=node.prompt_logprobs(prefill, 1, 3))
        node.say_all([early], prefill.id)
        c.decode[0].say(decode, 0, [*ids("a"), *ids("b")], end=Finished(reason="length"))
        # The decode node's word has been taken when the router has answered a later request about itself.
        await c.until("/ready", None)
        assert not request.done()
        last = node.output(prefill, 0, ids("a"))
        node.say_all([replace(last, prompt_logprobs=node.prompt_logprobs(prefill, 3))], prefill.id)
        node.say(prefill, 1, end=HandedOver())
        _, answer, _ = await request
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 6

    run(lambda: pair(manual=True), scenario)


def entries(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id=5, logprob=-1.0, rank=1)] * count


def test_tokens_wait_for_the_prompt_and_a_prompt_that_is_lost_is_an_error() -> None:
    life = AttemptLife({Half.PREFILL: "p", Half.DECODE: "d"}, num_prompt_logprobs=3)
    first = RequestOutput(id="x", position=0, prompt_logprobs=PromptLogprobs(position=1, tokens=entries(2)))
    assert not life.on_output(Half.PREFILL, first).token_ids
    assert not life.on_output(Half.DECODE, RequestOutput(id="x", position=0, token_ids=[7, 8])).token_ids
    # What was said already counts once.
    assert not life.on_output(Half.PREFILL, first).token_ids
    second = RequestOutput(
        id="x", position=0, token_ids=[7], prompt_logprobs=PromptLogprobs(position=3, tokens=entries(1))
    )
    assert life.on_output(Half.PREFILL, second).token_ids == [7, 8]
    assert len(life.prompt_logprobs) == 3

    life = AttemptLife({Half.PREFILL: "p", Half.DECODE: "d"}, num_prompt_logprobs=3)
    life.on_output(Half.DECODE, RequestOutput(id="x", position=0, token_ids=[7, 8]))
    with pytest.raises(NodeFailed):
        life.on_lost(Half.PREFILL, NodeFailed("p", "internal", "gone"))

    life = AttemptLife({Half.PREFILL: "p", Half.DECODE: "d"}, num_prompt_logprobs=3)
    end = Finished(reason="length")
    life.on_output(Half.DECODE, RequestOutput(id="x", position=0, token_ids=[7, 8], end=end))
    with pytest.raises(NodeFailed, match="before the output was complete"):
        life.on_output(Half.PREFILL, RequestOutput(id="x", position=1, end=HandedOver()))


def test_text_offsets_leave_out_what_the_tokenizer_added() -> None:
    token_ids = ids(PROMPT)
    plain = text_offsets(TOKENIZER, token_ids, PROMPT, skip_special_tokens=False)
    assert plain[0] == 0
    assert plain == sorted(plain)
    with_bos = text_offsets(TOKENIZER, [BOS_ID, *token_ids], PROMPT, skip_special_tokens=False)
    assert with_bos == [0, *plain]
    assert text_offsets(TOKENIZER, [BOS_ID, *token_ids], PROMPT, skip_special_tokens=True) == [0, *plain]
