"""Requests whose nodes fail go on elsewhere: the client sees each token once, and where there is nobody an error."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from pdserve_protocol.door import Address
from pdserve_protocol.outputs import Aborted, Failed, Finished, HandedOver
from pdserve_router.errors import NodeFailed, NodeLost, NotReady
from pdserve_router.lifecycle import Half
from pdserve_router.retries import is_worth_another, to_avoid
from support.fake_node import FakeNode
from support.router_cluster import DEADLINE_S, FILES, free_port, pair, parse_events, router_cluster

if TYPE_CHECKING:
    from pdserve_protocol.requests import AddRequest

COMPLETION = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 6, "ignore_eos": True}
TOKENS = [70, 71, 72, 73, 74, 75]
LENGTH = Finished(reason="length")


async def soon(queue: asyncio.Queue[Any]) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await queue.get()


def finish(node: FakeNode, half: AddRequest) -> None:
    """The rest of the output, as a node does that was given the first tokens of it."""
    seen = len(half.output_token_ids)
    assert half.output_token_ids == TOKENS[:seen]
    node.say(half, seen, TOKENS[seen:], end=LENGTH)


@pytest.mark.parametrize("stream", [True, False])
def test_a_decode_node_that_dies_in_mid_stream(stream: bool) -> None:
    # The other one goes on after the tokens that the client has.
    async def main() -> None:
        async with router_cluster([FakeNode("decode", FILES, manual=True) for _ in "ab"]) as c:
            post = c.session.post(c.url + COMPLETION, json=BODY | {"stream": stream})
            request = asyncio.create_task(post)
            first = await soon(c.decode[0].requests)
            c.decode[0].say(first, 0, TOKENS[:2])
            c.decode[0].say(first, 2, TOKENS[2:3])
            if stream:
                await request
            await c.until("/metrics", lambda body: "inter_token_latency_seconds_count 2.0" in body)
            await c.decode[0].close()
            second = await soon(c.decode[1].requests)
            assert second.id != first.id
            assert (second.sampling, second.choice) == (first.sampling, first.choice)
            assert second.timeout_s < first.timeout_s
            finish(c.decode[1], second)
            answer = await request
            if stream:
                events = parse_events(await answer.read())
                text = "".join(event["choices"][0]["text"] for event in events[:-1])
                proof = events[-2]["pdserve"]
            else:
                body = await answer.json()
                text, proof = body["choices"][0]["text"], body["pdserve"]
                assert body["usage"]["completion_tokens"] == 6
            assert (proof["retries"], proof["decode_node"], proof["exact"]) == (1, c.decode[1].address, True)
            assert text == c.server._registry.resolve(None).text.tokenizer.decode(TOKENS)
            assert 'retries_total{reason="node_lost"} 1.0' in (await c.get("/metrics"))[1]

    uvloop.run(main())


def test_a_prefill_node_that_dies_before_the_first_token() -> None:
    # Another one takes its place, and where there is none, the decode node by itself.
    async def main() -> None:
        nodes = [FakeNode("prefill", FILES, manual=True) for _ in "ab"] + [FakeNode("decode", FILES, manual=True)]
        async with router_cluster(nodes) as c:
            request = asyncio.create_task(c.post(COMPLETION, BODY))
            halves = [await soon(c.decode[0].requests)]
            for prefill in c.prefill:
                half = await soon(prefill.requests)
                assert (half.id, half.output_token_ids) == (halves[-1].id, [])
                await prefill.close()
                assert await soon(c.decode[0].aborted) == half.id
                halves.append(await soon(c.decode[0].requests))
            assert [half.receive_from is None for half in halves] == [False, False, True]
            finish(c.decode[0], halves[-1])
            status, body, _ = await request
            assert (status, body["pdserve"]["mode"], body["pdserve"]["retries"]) == (200, "aggregated", 2)

    uvloop.run(main())


def test_a_prefill_node_that_dies_with_the_only_kv() -> None:
    # Token 0 has left; who computes the prompt again does not sample it again.
    async def main() -> None:
        async with router_cluster(pair(manual=True)) as c:
            request = asyncio.create_task(c.session.post(c.url + COMPLETION, json=BODY | {"stream": True}))
            half = await soon(c.prefill[0].requests)
            c.prefill[0].say(half, 0, TOKENS[:1])
            answer = await request
            await answer.content.readuntil(b"\n\n")
            await soon(c.decode[0].requests)
            await c.prefill[0].close()
            again = await soon(c.decode[0].requests)
            assert (again.output_token_ids, again.receive_from) == (TOKENS[:1], None)
            finish(c.decode[0], again)
            assert parse_events(await answer.read())[-1] == "[DONE]"

    uvloop.run(main())


def test_another_model_under_the_same_name_does_not_go_on() -> None:
    # B20: the node of other weights is usable as soon as the first has gone, and still not for this request.
    async def main() -> None:
        old, port = FakeNode("decode", FILES, manual=True, model_id="old weights"), free_port()
        async with router_cluster([old], decode=tuple(Address("127.0.0.1", p) for p in (old.port, port))) as c:
            # The first to say hello defines what is served under the name.
            await c.until("/health", lambda body: body["decode"][0]["usable"])
            new = FakeNode("decode", FILES, manual=True, model_id="new weights", port=port)
            await c.until("/health", lambda body: body["decode"][1]["refused"])
            request = asyncio.create_task(c.post(COMPLETION, BODY))
            old.say(await soon(old.requests), 0, TOKENS[:1])
            await old.close()
            status, body, _ = await request
            assert (status, body["error"]["code"]) == (503, "node_lost")
            await c.until("/health", lambda body: body["decode"][1]["usable"])
            assert new.requests.empty()
        await new.close()

    uvloop.run(main())


def test_a_failed_hand_off_is_tried_with_others() -> None:
    async def main() -> None:
        async with router_cluster([*pair(manual=True), *pair(manual=True)]) as c:
            request = asyncio.create_task(c.post(COMPLETION, BODY))
            half = await soon(c.decode[0].requests)
            c.decode[0].say(half, 0, end=Failed(code="handoff", message="silent"))
            again = await soon(c.prefill[1].requests)
            c.prefill[1].say(again, 0, TOKENS[:1])
            c.prefill[1].say(again, 1, end=HandedOver())
            c.decode[1].say(await soon(c.decode[1].requests), 0, TOKENS, end=LENGTH)
            status, body, _ = await request
            assert (status, body["pdserve"]["mode"], body["pdserve"]["retries"]) == (200, "disaggregated", 1)
            assert await soon(c.prefill[0].aborted) == half.id

    uvloop.run(main())


def test_a_node_that_dies_before_it_is_asked_is_not_asked() -> None:
    # Tokenizing a long prompt, or compiling a grammar, takes long enough for that.
    async def main() -> None:
        async with router_cluster([FakeNode("decode", FILES, tokens=TOKENS) for _ in "abc"]) as c:
            text = c.server._registry.resolve(None).text
            prompt_ids = text.prompt_ids

            async def while_two_die(*args: Any, **kwargs: Any) -> list[int]:
                for node in c.decode[:2]:
                    await node.close()
                await c.until("/health", lambda body: sum(node["up"] for node in body["decode"]) == 1)
                return await prompt_ids(*args, **kwargs)

            text.prompt_ids = while_two_die  # type: ignore[method-assign]
            status, body, _ = await c.post(COMPLETION, BODY)
            assert (status, body["pdserve"]["decode_node"]) == (200, c.decode[2].address)

    uvloop.run(main())


def test_where_all_nodes_die_before_they_are_asked_it_is_an_error() -> None:
    async def main() -> None:
        async with router_cluster([FakeNode("decode", FILES)]) as c:
            text = c.server._registry.resolve(None).text

            async def while_it_dies(*_: Any, **__: Any) -> list[int]:
                await c.decode[0].close()
                await c.until("/health", lambda body: not body["decode"][0]["up"])
                return [7]

            text.prompt_ids = while_it_dies  # type: ignore[method-assign]
            status, body, headers = await c.post(COMPLETION, BODY)
            assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "not_ready", "1")

    uvloop.run(main())


def test_what_one_node_has_no_room_for_another_takes() -> None:
    async def main() -> None:
        async with router_cluster([FakeNode("decode", FILES, tokens=TOKENS) for _ in "ab"]) as c:
            full = c.decode[0]
            full.on_request = partial(full.say, position=0, end=Failed(code="overloaded", message="full"))
            answers = [await c.post(COMPLETION, BODY) for _ in range(4)]
            assert [status for status, _, _ in answers] == [200] * 4
            assert {body["pdserve"]["decode_node"] for _, body, _ in answers} == {c.decode[1].address}
            assert not full.requests.empty()

    uvloop.run(main())


def test_what_a_node_ended_of_itself_goes_on_there() -> None:
    # It missed the router's pings for a while.
    async def main() -> None:
        async with router_cluster([FakeNode("decode", FILES, manual=True)]) as c:
            request = asyncio.create_task(c.post(COMPLETION, BODY))
            half = await soon(c.decode[0].requests)
            c.decode[0].say(half, 0, TOKENS[:2])
            c.decode[0].say(half, 2, end=Aborted())
            again = await soon(c.decode[0].requests)
            assert again.output_token_ids == TOKENS[:2]
            finish(c.decode[0], again)
            status, body, _ = await request
            assert (status, body["pdserve"]["retries"], body["usage"]["completion_tokens"]) == (200, 1, 6)

    uvloop.run(main())


def test_there_is_an_end_to_trying() -> None:
    async def main() -> None:
        async with router_cluster([FakeNode("decode", FILES, manual=True) for _ in range(5)]) as c:
            for node in c.decode:
                node.on_request = partial(node.say, position=0, end=Failed(code="draining", message="no more"))
                node.manual = False
            status, body, _ = await c.post(COMPLETION, BODY)
            assert (status, body["error"]["code"]) == (503, "draining")
            assert sum(node.requests.qsize() for node in c.decode) == 3

    uvloop.run(main())


@pytest.mark.parametrize("code", ["draining", "stale_boot", "overloaded", "handoff"])
def test_without_another_node_it_is_an_error(code: str) -> None:
    async def main() -> None:
        async with router_cluster(pair(manual=True)) as c:
            request = asyncio.create_task(c.post(COMPLETION, BODY))
            while not request.done():
                asking = asyncio.create_task(c.decode[0].requests.get())
                await asyncio.wait([asking, request], return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    c.decode[0].say(asking.result(), 0, end=Failed(code=code, message="so it is"))  # type: ignore[arg-type]
                asking.cancel()
            status, body, headers = await request
            assert (status, body["error"]["code"], headers["Retry-After"]) == (503, code, "1")

    uvloop.run(main())


def test_what_is_worth_another_attempt_and_where() -> None:
    nodes = {Half.PREFILL: "p1", Half.DECODE: "d1"}
    lost, handoff = NodeLost("decode node d1"), NodeFailed("decode node d1", "handoff", "", "d1")
    draining, internal = NodeFailed("d1", "draining", "", "d1"), NodeFailed("d1", "internal", "", "d1")
    overloaded = NodeFailed("d1", "overloaded", "", "d1")
    assert [is_worth_another(error) for error in (lost, handoff, draining, overloaded, internal, NotReady(""))] == [
        *(True, True, True, True),
        *(False, False),
    ]
    assert to_avoid(lost, nodes, ["d1", "d2"]) == set()
    assert to_avoid(draining, nodes, ["d1"]) == to_avoid(overloaded, nodes, ["d1"]) == {"d1"}
    assert to_avoid(handoff, nodes, ["d1", "d2"]) == {"p1", "d1"}
    assert to_avoid(handoff, nodes, ["d1"]) == {"p1"}
