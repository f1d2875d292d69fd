"""The API in front of fake nodes, over real sockets."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from pdserve_protocol.outputs import Finished, HandedOver
from pdserve_router import generation
from pdserve_text.tokenizer import Tokenizer
from support.fake_node import PREFILL_PROOF, TRANSFER_PROOF, FakeNode
from support.router_cluster import DEADLINE_S, FILES, RouterCluster, pair, router_cluster
from support.tokenizers import EOS_ID

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve_protocol.requests import AddRequest

TOKENIZER = Tokenizer.from_files(FILES)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(
    nodes: Callable[[], list[FakeNode]], scenario: Callable[[RouterCluster], Awaitable[None]], **config: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), router_cluster(nodes(), **config) as cluster:
            await scenario(cluster)

    uvloop.run(main())


async def soon(queue: asyncio.Queue[Any]) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await queue.get()


def streamed_text(events: list[Any]) -> str:
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def test_chat_and_completion_plain_and_streamed() -> None:
    answer = f"the answer é 東京 {FAMILY}!"

    async def scenario(c: RouterCluster) -> None:
        status, chat, _ = await c.post(CHAT, HELLO)
        assert status == 200
        assert chat["object"] == "chat.completion"
        assert chat["choices"][0]["message"] == {"role": "assistant", "content": answer, "refusal": None}
        assert chat["choices"][0]["finish_reason"] == "stop"
        assert chat["usage"]["completion_tokens"] == len(ids(answer)) + 1
        events = await c.stream(CHAT, HELLO)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
        assert len({event["id"] for event in events[:-1]}) == 1
        assert [event["choices"][0]["finish_reason"] for event in events[-3:-1]] == [None, "stop"]
        assert events[-1] == "[DONE]"
        # B87: the split between the nodes is after the first token.
        assert streamed_text(events) == answer

        body = {"prompt": "x", "max_tokens": 100}
        _, completion, _ = await c.post(COMPLETION, body)
        assert completion["object"] == "text_completion"
        assert completion["choices"][0]["text"] == answer
        events = await c.stream(COMPLETION, body)
        assert {event["object"] for event in events[:-1]} == {"text_completion"}
        assert streamed_text(events) == answer

    run(lambda: pair([*ids(answer), EOS_ID]), scenario)


def test_characters_cut_off_by_max_tokens_are_dropped_the_same_way_streamed_or_not() -> None:
    # B88
    async def scenario(c: RouterCluster) -> None:
        for n in range(1, 7):
            body = {"prompt": "x", "max_tokens": n}
            _, plain, _ = await c.post(COMPLETION, body)
            assert plain["usage"]["completion_tokens"] == n
            text = plain["choices"][0]["text"]
            assert FAMILY.startswith(text)
            assert streamed_text(await c.stream(COMPLETION, body)) == text

    run(lambda: pair(ids(FAMILY)), scenario)


def test_the_halves_of_a_request() -> None:
    async def scenario(c: RouterCluster) -> None:
        # B75: the client's limit travels whole; it is the hand-off that makes the prefill node stop after one token.
        # B105: what a client says about KV transfer reaches no node.
        evil = {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 1}
        await c.post(
            COMPLETION,
            {
                "prompt": "a b",
                "max_tokens": 9,
                "seed": 5,
                "kv_transfer_params": evil,
                "cache_salt": "s",
                "priority": -2,
            },
        )
        prefill, decode = await soon(c.prefill[0].requests), await soon(c.decode[0].requests)
        assert prefill.prompt_token_ids == decode.prompt_token_ids == ids("a b")
        assert prefill.sampling == decode.sampling
        assert (prefill.sampling.max_tokens, prefill.sampling.seed, prefill.cache_salt) == (9, 5, "s")
        assert prefill.priority == decode.priority == -2
        assert prefill.id == decode.id
        assert (prefill.send_to.host, prefill.send_to.port) == ("127.0.0.1", c.decode[0].port)
        assert prefill.send_to.boot_id == decode.boot_id == c.decode[0].boot_id
        assert decode.receive_from.boot_id == prefill.boot_id == c.prefill[0].boot_id
        assert decode.send_to is None
        assert prefill.receive_from is None
        assert "evil" not in repr((prefill, decode))

    run(lambda: pair(ids("ok")), scenario)


def test_chat_goes_through_the_template_once() -> None:
    async def scenario(c: RouterCluster) -> None:
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        await c.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
        rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert (await soon(c.prefill[0].requests)).prompt_token_ids == ids(rendered)
        # A chat without a limit may use all that is left of the context.
        assert (await soon(c.decode[0].requests)).sampling.max_tokens == 256 - len(ids(rendered))

    run(lambda: pair(ids("ok")), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_one_needs_no_decode_node(stream: bool) -> None:
    # B73
    async def scenario(c: RouterCluster) -> None:
        body = {"prompt": "x", "max_tokens": 1}
        if stream:
            events = await c.stream(COMPLETION, body | {"stream_options": {"include_usage": True}})
            assert streamed_text(events) == "a"
            assert events[-3]["choices"][0]["finish_reason"] == "length"
            usage, proof = events[-2]["usage"], events[-3]["pdserve"]
        else:
            _, answer, _ = await c.post(COMPLETION, body)
            assert answer["choices"][0]["text"] == "a"
            assert answer["choices"][0]["finish_reason"] == "length"
            usage, proof = answer["usage"], answer["pdserve"]
        assert usage["completion_tokens"] == 1
        assert (proof["mode"], proof["decode_node"], proof["bytes_moved"]) == ("prefill_only", None, 0)
        assert (await soon(c.prefill[0].requests)).send_to is None
        assert c.decode[0].requests.empty()
        _, two, _ = await c.post(COMPLETION, {"prompt": "x", "max_tokens": 2})
        assert two["choices"][0]["text"] == "ab"
        assert two["usage"]["completion_tokens"] == 2
        # The first token's text as a stop string.
        _, stopped, _ = await c.post(COMPLETION, {"prompt": "x", "max_tokens": 1, "stop": "a"})
        assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("", "stop")

    run(lambda: pair([*ids("a"), *ids("b")]), scenario)


def test_a_first_token_that_ends_the_output() -> None:
    # B45
    async def scenario(c: RouterCluster) -> None:
        _, answer, _ = await c.post(CHAT, HELLO)
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
        events = await c.stream(CHAT, HELLO)
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, "stop"]
        assert c.prefill[0].aborted.empty()
        _, answer, _ = await c.post(COMPLETION, {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"
        body = {"prompt": "x", "ignore_eos": True, "stop_token_ids": [EOS_ID]}
        _, answer, _ = await c.post(COMPLETION, body)
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 1)

    run(lambda: pair([EOS_ID]), scenario)


def test_the_first_token_is_streamed_when_the_prefill_node_has_it() -> None:
    # B85
    async def scenario(c: RouterCluster) -> None:
        async with c.session.post(c.url + CHAT, json=HELLO | {"stream": True}) as answer:
            assert await answer.content.readuntil(b"\n\n")
            first = json.loads((await answer.content.readuntil(b"\n\n")).removeprefix(b"data: "))
            assert first["choices"][0]["delta"]["content"] == "a"
            # Only now does the decode node say anything.
            half = await soon(c.decode[0].requests)
            c.decode[0].say(half, 0, ids("a"), transfer=TRANSFER_PROOF)
            for position, letter in enumerate("bcd", 1):
                c.decode[0].say(half, position, ids(letter))
                event = json.loads((await answer.content.readuntil(b"\n\n")).removeprefix(b"data: "))
                assert event["choices"][0]["delta"]["content"] == letter
            c.decode[0].say(half, 4, [EOS_ID], end=Finished(reason="stop", stop_token_id=EOS_ID))
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")

    run(lambda: [FakeNode("prefill", FILES, tokens=ids("ab")), FakeNode("decode", FILES, manual=True)], scenario)


def test_usage_in_streams_only_when_asked() -> None:
    # B98
    async def scenario(c: RouterCluster) -> None:
        for options in (None, {}, {"include_usage": False}):
            events = await c.stream(CHAT, HELLO | {"stream_options": options})
            assert not any("usage" in event for event in events[:-1])
        events = await c.stream(CHAT, HELLO | {"stream_options": {"include_usage": True}})
        *others, last, done = events
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"] == {
            "prompt_tokens": len((await soon(c.prefill[0].requests)).prompt_token_ids),
            "completion_tokens": 4,
            "total_tokens": last["usage"]["prompt_tokens"] + 4,
            "prompt_tokens_details": {"cached_tokens": PREFILL_PROOF.cached_tokens},
        }
        assert all(event["usage"] is None for event in others)
        both = {"include_usage": True, "continuous_usage_stats": True}
        *others, last, _ = await c.stream(CHAT, HELLO | {"stream_options": both})
        counts = [
            event["usage"]["completion_tokens"] for event in others if event["choices"][0]["delta"].get("content")
        ]
        assert counts == [1, 2, 3]
        assert last["usage"]["completion_tokens"] == 4

    run(lambda: pair([*ids("a"), *ids("b"), *ids("c"), EOS_ID]), scenario)


def test_log_probabilities_of_every_token_from_the_first() -> None:
    # B79
    tokens = [*ids("a"), *ids(" the"), *ids("é"), *ids("b")]

    async def scenario(c: RouterCluster) -> None:
        for n in (1, 5):
            _, answer, _ = await c.post(COMPLETION, {"prompt": "x", "max_tokens": n, "logprobs": 3, "ignore_eos": True})
            logprobs = answer["choices"][0]["logprobs"]
            assert [len(values) for values in logprobs.values()] == [n] * 4
            assert all(len(top) == 3 for top in logprobs["top_logprobs"])
            body = HELLO | {"max_tokens": n, "logprobs": True, "top_logprobs": 3}
            _, answer, _ = await c.post(CHAT, body)
            content = answer["choices"][0]["logprobs"]["content"]
            assert [len(entry["top_logprobs"]) for entry in content] == [3] * n
            events = await c.stream(CHAT, body)
            pieces = [e["choices"][0]["logprobs"]["content"] for e in events[:-1] if e["choices"][0]["logprobs"]]
            assert [entry for piece in pieces for entry in piece] == content
        assert logprobs["tokens"][:2] == ["a", " the"]
        assert logprobs["text_offset"] == [0, 1, 5, 6, 7]
        assert bytes(b for entry in content for b in entry["bytes"]).decode() == "a theéba"

    run(lambda: pair(tokens), scenario)


def test_stop_strings_end_both_halves() -> None:
    # B90, B92
    async def scenario(c: RouterCluster) -> None:
        request = asyncio.create_task(
            c.post(COMPLETION, {"prompt": "x", "max_tokens": 99, "stop": ["b c"], "logprobs": 0})
        )
        prefill, decode = await soon(c.prefill[0].requests), await soon(c.decode[0].requests)
        c.prefill[0].say(prefill, 0, ids("a"))
        for position, token in enumerate(["a", "b", " c", "d"]):
            c.decode[0].say(decode, position, ids(token)[:1])
        _, answer, _ = await request
        assert answer["choices"][0]["text"] == "a"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["logprobs"]["tokens"] == ["a"]
        assert answer["usage"]["completion_tokens"] >= 3
        assert await soon(c.prefill[0].aborted) == await soon(c.decode[0].aborted) == decode.id

    run(lambda: pair(manual=True), scenario)


def test_an_end_settles_the_halves_without_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than the test may take: what is waited for is the proof, not the time.
    monkeypatch.setattr(generation, "_LATE_PROOF_S", 60.0)

    async def scenario(c: RouterCluster) -> None:
        request = asyncio.create_task(c.post(COMPLETION, {"prompt": "x", "max_tokens": 2}))
        decode = await soon(c.decode[0].requests)
        c.decode[0].say(decode, 0, ids("ab")[:1] + ids("b")[:1], end=Finished(reason="length"))
        # The prefill node's word may come last; its proof is waited for, and nothing else of it.
        await c.get("/health")
        c.prefill[0].say(await soon(c.prefill[0].requests), 0, ids("a"), prefill=PREFILL_PROOF, end=HandedOver())
        _, answer, _ = await request
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["pdserve"]["cached_tokens"]["prefill"] == PREFILL_PROOF.cached_tokens
        await c.get("/health")
        assert c.prefill[0].aborted.empty()

    run(lambda: pair(manual=True), scenario)


def test_a_decode_half_that_is_not_needed_any_more_is_told_so() -> None:
    # Its peer may never reach it, and it would wait for the length of the request's time limit.
    async def scenario(c: RouterCluster) -> None:
        request = asyncio.create_task(c.post(COMPLETION, {"prompt": "x", "max_tokens": 9}))
        decode = await soon(c.decode[0].requests)
        end = Finished(reason="stop", stop_token_id=EOS_ID)
        c.prefill[0].say(await soon(c.prefill[0].requests), 0, [EOS_ID], prefill=PREFILL_PROOF, end=end)
        assert (await request)[0] == 200
        assert await soon(c.decode[0].aborted) == decode.id
        assert c.prefill[0].aborted.empty()

    run(lambda: pair(manual=True), scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_first_token", [False, True])
def test_a_client_that_goes_away_frees_both_halves(stream: bool, after_first_token: bool) -> None:
    # B42, B60
    async def scenario(c: RouterCluster) -> None:
        request = asyncio.create_task(c.session.post(c.url + CHAT, json=HELLO | {"stream": stream}))
        prefill, decode = await soon(c.prefill[0].requests), await soon(c.decode[0].requests)
        if after_first_token:
            c.prefill[0].say(prefill, 0, ids("a"), prefill=PREFILL_PROOF)
        if stream and after_first_token:
            answer = await request
            await answer.content.readuntil(b"\n\n")
            answer.close()
        else:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        async with asyncio.timeout(1):
            assert await c.prefill[0].aborted.get() == await c.decode[0].aborted.get() == decode.id
        text = await c.until("/metrics", lambda body: 'end="client_gone"' in body)
        assert "pdserve_router_requests_running 0.0" in text

    run(lambda: pair(manual=True), scenario)


def test_proof_and_metrics_say_the_same() -> None:
    # B110, B116: each prompt token counted once a side, by where its KV came from.
    async def scenario(c: RouterCluster) -> None:
        _, answer, _ = await c.post(COMPLETION, {"prompt": ids("a b c"), "max_tokens": 2})
        num_prompt = answer["usage"]["prompt_tokens"]
        assert answer["pdserve"] == {
            "mode": "disaggregated",
            "prefill_node": c.prefill[0].address,
            "decode_node": c.decode[0].address,
            "transport": "fake",
            "blocks_moved": 3,
            "bytes_moved": 12288,
            "tokens_recomputed": 0,
            "cached_tokens": {"prefill": 2, "decode": 1},
            "exact": True,
            "blocks_resent": 0,
            "retries": 0,
            "reason": None,
            "time": {
                "queue_ms": 1.0,
                "prefill_ms": 20.0,
                "grant_ms": 1.0,
                "transfer_ms": 2.0,
                "landing_ms": 3.0,
                "admission_ms": 4.0,
            },
        }
        events = await c.stream(COMPLETION, {"prompt": ids("a b c"), "max_tokens": 2})
        assert events[-2]["pdserve"] == answer["pdserve"]
        lines = (await c.get("/metrics"))[1].splitlines()

        def value(name: str) -> float:
            return next(
                float(line.rpartition(" ")[2]) for line in lines if line.startswith("pdserve_router_" + name + " ")
            )

        assert value("kv_bytes_moved_total") == 2 * 12288
        assert value("kv_blocks_moved_total") == 6
        assert value("generated_tokens_total") == 4
        assert value('prompt_tokens_total{side="prefill",source="cached"}') == 4
        assert value('prompt_tokens_total{side="prefill",source="computed"}') == 2 * num_prompt - 4
        assert value('prompt_tokens_total{side="decode",source="cached"}') == 2
        assert value('prompt_tokens_total{side="decode",source="transferred"}') == 2 * num_prompt - 2
        assert value('prompt_tokens_total{side="decode",source="recomputed"}') == 0
        assert value('requests_total{end="length",endpoint="completion",status="200"}') == 2
        assert value("time_to_first_token_seconds_count") == 2
        assert value("inter_token_latency_seconds_count") == 2
        assert value('nodes_up{role="decode"}') == 1

    run(lambda: pair(ids("ab")), scenario)


def test_aggregated_serving() -> None:
    async def scenario(c: RouterCluster) -> None:
        _, answer, _ = await c.post(COMPLETION, {"prompt": "x", "max_tokens": 3})
        proof = answer["pdserve"]
        assert (proof["mode"], proof["prefill_node"], proof["transport"]) == ("aggregated", None, None)
        assert proof["cached_tokens"] == {"prefill": None, "decode": 2}
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        half = await soon(c.decode[0].requests)
        assert half.send_to is half.receive_from is None
        # One node does a single token as well.
        assert (await c.post(COMPLETION, {"prompt": "x", "max_tokens": 1}))[0] == 200
        assert "fallbacks_total{" not in (await c.get("/metrics"))[1]

    run(lambda: [FakeNode("decode", FILES, tokens=ids("abc"))], scenario)


@pytest.mark.slow
def test_nodes_take_turns_and_drained_ones_take_none() -> None:
    def nodes() -> list[FakeNode]:
        return [*pair(ids("ab")), *pair(ids("ab"))]

    async def scenario(c: RouterCluster) -> None:
        for _ in range(4):
            assert (await c.post(COMPLETION, {"prompt": "x", "max_tokens": 2}))[0] == 200
        assert [node.requests.qsize() for node in (*c.prefill, *c.decode)] == [2, 2, 2, 2]
        c.decode[0].draining = True
        await c.until("/health", lambda body: body["decode"][0]["draining"])
        for _ in range(4):
            _, answer, _ = await c.post(COMPLETION, {"prompt": "x", "max_tokens": 2})
            assert answer["pdserve"]["decode_node"] == c.decode[1].address

    run(nodes, scenario)


def test_request_ids_are_echoed_and_never_used() -> None:
    # B62, B51
    async def scenario(c: RouterCluster) -> None:
        odd = "same id, odd ~ characters: %s \\"
        body = {"prompt": "x", "max_tokens": 2}
        answers = await asyncio.gather(*(c.post(COMPLETION, body, **{"X-Request-Id": odd}) for _ in range(3)))
        assert [(status, headers["X-Request-Id"]) for status, _, headers in answers] == [(200, odd)] * 3
        halves: list[AddRequest] = [await soon(c.decode[0].requests) for _ in range(3)]
        assert len({half.id for half in halves}) == 3
        assert {half.client_id for half in halves} == {odd}
        assert all(len(half.id) == 32 for half in halves)
        own = [(await c.post(COMPLETION, body))[2]["X-Request-Id"] for _ in range(2)]
        assert len(set(own)) == 2
        too_long = (await c.post(COMPLETION, body, **{"X-Request-Id": "x" * 5000}))[2]["X-Request-Id"]
        assert too_long.startswith("req-")
        assert "X-Request-Id" in (await c.post("/nowhere", {}))[2]

    run(lambda: pair(ids("ab")), scenario)


@pytest.mark.slow
def test_a_prompt_that_takes_long_to_tokenize_holds_up_nobody() -> None:
    # B108: everything else, the sign of life to the nodes included, comes from the same event loop.
    body = json.dumps({"prompt": "x " * (1 << 19)}).encode()

    async def scenario(c: RouterCluster) -> None:
        start = last = time.monotonic()
        longest = 0.0
        request = asyncio.create_task(c.post(COMPLETION, io.BytesIO(body)))
        while not request.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert (await request)[0] == 400
        assert longest < (last - start) / 3, "one stall was most of the request"

    run(lambda: pair(ids("ab"), max_model_len=1 << 19, kv_capacity_tokens=1 << 19), scenario)


@pytest.mark.parametrize(("path", "field"), [(COMPLETION, "prompt"), (CHAT, "messages")])
def test_a_prompt_that_can_never_fit_is_not_even_tokenized(
    path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B108
    text, ids_and_a_bad_one = "x" * 100_000, [5] * 1000 + [1 << 40]
    monkeypatch.delattr(Tokenizer, "encode")

    async def scenario(c: RouterCluster) -> None:
        for prompt in (text, ids_and_a_bad_one) if path == COMPLETION else ([{"role": "user", "content": text}],):
            status, answer, _ = await c.post(path, {field: prompt})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert answer["error"]["param"] == field
            assert ("at least" in answer["error"]["message"]) == (prompt != ids_and_a_bad_one)

    run(pair, scenario)


@pytest.mark.slow
def test_bad_requests_reach_no_node() -> None:
    # B64, B66, B100
    bad: list[tuple[str, Any, int, str | None]] = [
        (CHAT, HELLO | {"model": "gpt-9" * 1000}, 404, "model"),
        (CHAT, HELLO | {"temperature": 3}, 400, "temperature"),
        (CHAT, HELLO | {"n": 129}, 400, "n"),
        (CHAT, HELLO | {"stream": True, "max_tokens": 10**6}, 400, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 500}]}, 400, "messages"),
        (CHAT, b"{", 400, None),
        (COMPLETION, {"prompt": [5, 384]}, 400, "prompt[1]"),
        (COMPLETION, {"prompt": "x", "logit_bias": {"AI": 1}}, 400, "logit_bias"),
        (COMPLETION, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETION, {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETION, b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
        (COMPLETION, io.BytesIO(b'{"prompt": "' + b"x" * (9 << 20)), 413, None),
    ]

    async def scenario(c: RouterCluster) -> None:
        for path, body, status, param in bad:
            got, answer, _ = await c.post(path, body)
            assert (got, answer["error"]["param"]) == (status, param), answer
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert len(answer["error"]["message"]) < 400
        _, answer, _ = await c.post(COMPLETION, {"prompt": "x", "max_tokens": 1000})
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "256" in answer["error"]["message"]
        assert "1001" in answer["error"]["message"]
        assert c.prefill[0].requests.empty()
        assert c.decode[0].requests.empty()
        assert "requests_running 0.0" in (await c.get("/metrics"))[1]

    run(lambda: pair(ids("ab")), scenario)


def test_what_can_never_fit_the_cache_is_refused_and_blocks_nobody() -> None:
    # B44
    async def scenario(c: RouterCluster) -> None:
        for body in ({"prompt": [5] * 70}, {"prompt": [5] * 10, "max_tokens": 60}):
            status, answer, _ = await c.post(COMPLETION, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert "64 tokens" in answer["error"]["message"]
        assert (await c.post(COMPLETION, {"prompt": [5] * 60, "max_tokens": 4}))[0] == 200

    run(lambda: pair(ids("ab"), kv_capacity_tokens=64), scenario)


def test_models_and_status() -> None:
    async def scenario(c: RouterCluster) -> None:
        status, models = await c.get("/v1/models")
        assert status == 200
        assert [model["id"] for model in models["data"]] == ["fake"]
        assert (await c.get("/v1/models/fake"))[1] == models["data"][0]
        assert (await c.get("/v1/models/other"))[0] == 404
        assert (await c.get("/nowhere"))[1]["error"]["code"] == "not_found"
        status, body = await c.get(CHAT)
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")
        assert "version" in (await c.get("/version"))[1]
        health = (await c.get("/health"))[1]
        assert (health["status"], health["pair"]) == ("ok", True)

    run(pair, scenario)


@pytest.mark.slow
def test_a_slow_reader_holds_up_nobody() -> None:
    async def scenario(c: RouterCluster) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]), limit=1024)
        data = json.dumps({"prompt": "x", "stream": True, "max_tokens": 60_000}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        slow = await soon(c.decode[0].requests)
        for start in range(0, 60_000, 20_000):
            outputs = [c.decode[0].output(slow, start + i, ids("a")) for i in range(20_000)]
            c.decode[0].say_all(outputs, slow.id)
        request = asyncio.create_task(c.post(COMPLETION, {"prompt": "x", "max_tokens": 1}))
        quick = await soon(c.decode[0].requests)
        c.decode[0].say(quick, 0, ids("a"), end=Finished(reason="length"))
        async with asyncio.timeout(DEADLINE_S):
            assert (await request)[0] == 200
        writer.close()
        assert await soon(c.decode[0].aborted) == slow.id
        del reader

    run(lambda: [FakeNode("decode", FILES, manual=True, max_model_len=1 << 20, kv_capacity_tokens=1 << 20)], scenario)


def test_one_tokenization_for_both_nodes_whatever_the_text_holds() -> None:
    # B27
    async def scenario(c: RouterCluster) -> None:
        for text in ("<|im_end|>", "a<|im_start|>system\nb", "\u200d\U0001f468", " ", "\x00", "é" * 50):
            status, _, _ = await c.post(CHAT, {"messages": [{"role": "user", "content": text}]})
            assert status == 200
            prefill, decode = await soon(c.prefill[0].requests), await soon(c.decode[0].requests)
            assert prefill.prompt_token_ids == decode.prompt_token_ids
            assert text in TOKENIZER.decode(decode.prompt_token_ids, skip_special_tokens=False)

    run(lambda: pair(ids("ok")), scenario)


def test_parallel_answers_do_not_mix() -> None:
    # B29: each node echoes the prompt it was given, a token of each request at a time, some clients go away.
    words = [f"secret{i:02d}" for i in range(16)]

    async def scenario(c: RouterCluster) -> None:
        requests = [asyncio.create_task(c.post(COMPLETION, {"prompt": word, "max_tokens": 99})) for word in words]
        gone = [asyncio.create_task(c.post(COMPLETION, {"prompt": "gone", "max_tokens": 99})) for _ in range(4)]
        halves = [await soon(c.decode[0].requests) for _ in range(20)]
        for task in gone:
            task.cancel()
        for half in [await soon(c.prefill[0].requests) for _ in range(20)]:
            c.prefill[0].say(half, 0, half.prompt_token_ids[:1], prefill=PREFILL_PROOF)
        for position in range(max(len(half.prompt_token_ids) for half in halves)):
            step = []
            for half in halves:
                end = Finished(reason="length") if position == len(half.prompt_token_ids) - 1 else None
                if position < len(half.prompt_token_ids):
                    step.append(c.decode[0].output(half, position, [half.prompt_token_ids[position]], end=end))
            c.decode[0].say_all(step, halves[0].id)
        for word, request in zip(words, requests, strict=True):
            assert (await request)[1]["choices"][0]["text"] == word

    run(lambda: pair(manual=True), scenario)
