"""What clients see when nodes fail, die, restart, drain or disagree, and when the router itself stops."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
import uvloop
from pdserve_protocol.door import Address
from pdserve_protocol.outputs import Failed, Finished
from pdserve_router import registry
from pdserve_router.dispatcher import Attempt
from pdserve_router.errors import RouterDraining
from pdserve_router.output_processor import OutputProcessor
from pdserve_router.placement import Placed
from support.fake_node import LAYOUT, FakeNode
from support.router_cluster import DEADLINE_S, FILES, free_port, pair, parse_events, router_cluster

COMPLETION = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 9}


async def soon(queue: asyncio.Queue[Any]) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return await queue.get()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_half_is_an_http_error_before_the_first_byte(stream: bool) -> None:
    # B103: the class of the status is kept, and overload says when to come again.
    expected = {
        "overloaded": 503,
        "deadline": 504,
        "does_not_fit": 400,
        "bad_request": 400,
        "internal": 500,
    }

    async def main() -> None:
        async with router_cluster(pair(manual=True)) as c:
            for i, (code, status) in enumerate(expected.items()):
                request = asyncio.create_task(c.post(COMPLETION, BODY | {"stream": stream}))
                halves = await soon(c.prefill[0].requests), await soon(c.decode[0].requests)
                failing, other = (c.prefill[0], c.decode[0]) if i % 2 else (c.decode[0], c.prefill[0])
                failing.say(halves[0], 0, end=Failed(code=code, message="so it is"))  # type: ignore[arg-type]
                got, body, headers = await request
                assert (got, body["error"]["code"]) == (status, code)
                assert "so it is" in body["error"]["message"]
                assert ("Retry-After" in headers) == (status == 503)
                # The other half is ended, the failed one has ended itself.
                assert await soon(other.aborted) == halves[0].id
                assert failing.aborted.empty()

    uvloop.run(main())


def test_a_failure_after_the_first_byte_is_an_error_event_and_no_done() -> None:
    # B83
    async def main() -> None:
        async with router_cluster(pair(manual=True)) as c:
            for _ in range(2):
                request = asyncio.create_task(c.session.post(c.url + COMPLETION, json=BODY | {"stream": True}))
                prefill, decode = await soon(c.prefill[0].requests), await soon(c.decode[0].requests)
                c.prefill[0].say(prefill, 0, [70])
                answer = await request
                assert answer.status == 200
                c.decode[0].say(decode, 0, [70])
                c.decode[0].say(decode, 1, end=Failed(code="internal", message="a fault"))
                events = parse_events(await answer.read())
                assert events[-1]["error"]["code"] == "internal"
                # What the client saw is counted: the status had left before.
                assert 'end="internal",endpoint="completion",status="200"' in (await c.get("/metrics"))[1]
                assert all(e.get("choices", [{"finish_reason": None}])[0]["finish_reason"] is None for e in events)
                assert await soon(c.prefill[0].aborted) == decode.id

    uvloop.run(main())


@pytest.mark.slow
def test_a_node_restarted_at_its_address_serves_again() -> None:
    # B113
    async def main() -> None:
        async with router_cluster(pair([70, 71])) as c:
            old = c.decode[0]
            old.on_request = lambda request: None
            request = asyncio.create_task(c.post(COMPLETION, BODY))
            await soon(old.requests)
            await old.close()
            new = FakeNode("decode", FILES, tokens=[70, 71], port=old.port)
            try:
                async with asyncio.timeout(5):
                    assert (await request)[0] == 503
                await c.until("/health", lambda body: body["decode"][0]["boot_id"] == new.boot_id)
                status, answer, _ = await c.post(COMPLETION, BODY)
                assert (status, answer["usage"]["completion_tokens"]) == (200, 9)
                assert (await soon(new.requests)).boot_id == new.boot_id
            finally:
                await new.close()

    uvloop.run(main())


@pytest.mark.slow
def test_without_a_prefill_node_the_decode_node_does_it_all_and_it_is_counted() -> None:
    # B110: never in silence. B115: nor is the router less ready for it.
    async def main() -> None:
        async with router_cluster(pair([70, 71])) as c:
            c.prefill[0].draining = True
            await c.until("/health", lambda body: body["prefill"][0]["draining"])
            status, answer, _ = await c.post(COMPLETION, BODY)
            assert (status, answer["pdserve"]["mode"]) == (200, "aggregated")
            assert 'fallbacks_total{reason="no_prefill_node"} 1.0' in (await c.get("/metrics"))[1]
            assert await c.get("/ready") == (200, {"status": "ready", "degraded": True, "models": ["fake"]})
            health = (await c.get("/health"))[1]
            assert (health["degraded"], health["pair"], health["can_serve"]) == (True, False, True)
            c.decode[0].draining = True
            await c.until("/health", lambda body: body["decode"][0]["draining"])
            status, body, headers = await c.post(COMPLETION, BODY)
            assert (status, headers["Retry-After"]) == (503, "1")
            status, body = await c.get("/ready")
            assert (status, body["error"]["code"]) == (503, "not_ready")

    uvloop.run(main())


def test_a_prefill_node_alone_makes_no_router_ready() -> None:
    async def main() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            nobody = (Address("127.0.0.1", probe.getsockname()[1]),)
            async with router_cluster([FakeNode("prefill", FILES)], wait_ready=False, decode=nobody) as c:
                await c.until("/health", lambda body: body["prefill"][0]["usable"])
                body = await c.until("/ready", lambda body: "No decode node" in body["error"]["message"], status=503)
                assert body["error"]["code"] == "not_ready"
                assert (await c.get("/health"))[1]["can_serve"] is False

    uvloop.run(main())


def test_nodes_whose_layouts_differ_are_not_paired() -> None:
    # B09: refused when they meet, not per request and not in silence.
    other = LAYOUT.__class__(**{f: getattr(LAYOUT, f) for f in LAYOUT.__struct_fields__} | {"block_size": 32})

    async def main() -> None:
        nodes = [FakeNode("prefill", FILES, tokens=[70], layout=other), *pair([70, 71])]
        async with router_cluster(nodes) as c:
            for _ in range(3):
                _, answer, _ = await c.post(COMPLETION, BODY)
                assert answer["pdserve"]["prefill_node"] == c.prefill[1].address
        nodes = [FakeNode("prefill", FILES, tokens=[70], layout=other), FakeNode("decode", FILES, tokens=[70, 71])]
        async with router_cluster(nodes, degraded=True) as c:
            await c.until("/health", lambda body: body["prefill"][0]["usable"])
            assert (await c.get("/health"))[1]["pair"] is False
            _, answer, _ = await c.post(COMPLETION, BODY)
            assert answer["pdserve"]["mode"] == "aggregated"
            assert 'fallbacks_total{reason="mismatch"} 1.0' in (await c.get("/metrics"))[1]

    uvloop.run(main())


def test_nodes_are_told_of_one_another() -> None:
    async def main() -> None:
        async with router_cluster(pair([70, 71])) as c, asyncio.timeout(DEADLINE_S):
            prefill, decode = c.prefill[0], c.decode[0]
            for node, other in ((prefill, decode), (decode, prefill)):
                (peer,) = (await node.met.get()).peers
                assert (peer.port, peer.boot_id) == (int(other.address.rpartition(":")[2]), other.boot_id)

    uvloop.run(main())


def test_nodes_are_told_again_so_that_links_that_were_lost_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MEET_AGAIN_S", 0.01)

    async def main() -> None:
        async with router_cluster(pair()) as c, asyncio.timeout(DEADLINE_S):
            for _ in range(5):
                (peer,) = (await c.prefill[0].met.get()).peers
                assert peer.boot_id == c.decode[0].boot_id

    uvloop.run(main())


@pytest.mark.parametrize(("field", "value"), [("tokenizer_id", "tokenizer-2"), ("model_id", "model-2")])
def test_a_name_means_what_its_first_node_serves_until_that_has_gone(field: str, value: str) -> None:
    async def main() -> None:
        first = FakeNode("decode", FILES, tokens=[70])
        port = free_port()
        prefill = (Address("127.0.0.1", port),)
        async with router_cluster([first], prefill=prefill, degraded=True) as c:
            second = FakeNode("prefill", FILES, tokens=[70], port=port, **{field: value})  # type: ignore[arg-type]
            try:
                health = await c.until("/health", lambda body: body["prefill"][0]["up"])
                node = health["prefill"][0]
                assert (node["usable"], node["refused"]) == (
                    False,
                    f"it serves fake as {first.address} does, but its {field} differs",
                )
                assert (health["pair"], health["degraded"]) == (False, True)
                _, answer, _ = await c.post(COMPLETION, BODY)
                assert answer["pdserve"]["mode"] == "aggregated"
                await first.close()
                health = await c.until("/health", lambda body: body["prefill"][0]["usable"])
                assert health["prefill"][0]["refused"] is None
            finally:
                await second.close()

    uvloop.run(main())


def test_a_node_of_another_protocol_version_is_not_used() -> None:
    async def main() -> None:
        odd = FakeNode("decode", FILES, version=99)
        async with router_cluster([odd, FakeNode("decode", FILES, tokens=[70])]) as c:
            health = await c.until("/health", lambda body: body["decode"][0]["up"])
            assert "protocol version 99" in health["decode"][0]["refused"]
            for _ in range(2):
                assert (await c.post(COMPLETION, BODY))[0] == 200
            assert odd.requests.empty()

    uvloop.run(main())


def test_a_tokenizer_of_no_use_is_asked_for_once_and_its_nodes_are_refused() -> None:
    async def main() -> None:
        async with router_cluster([FakeNode("decode", {"tokenizer.json": b"{"})], wait_ready=False) as c:
            health = await c.until("/health", lambda body: body["decode"][0]["refused"])
            assert "tokenizer.json: not JSON" in health["decode"][0]["refused"]
            assert (await c.get("/ready"))[0] == 503
            assert c.decode[0].tokenizers_given.qsize() == 1

    uvloop.run(main())


def test_nobody_goes_on_looking_for_the_tokenizer_of_nodes_that_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TOKENIZER_RETRY_S", 0.01)
    monkeypatch.setattr(registry, "_TOKENIZER_TIMEOUT_S", 0.05)

    async def main() -> None:
        node = FakeNode("decode", FILES)
        node.gives_tokenizer = "another"
        async with router_cluster([node], wait_ready=False) as c, asyncio.timeout(DEADLINE_S):
            for _ in range(3):
                await node.tokenizers_given.get()
            (search,) = (task for task in asyncio.all_tasks() if "NodeRegistry._fetch" in repr(task.get_coro()))
            await node.close()
            await c.until("/health", lambda body: not body["decode"][0]["up"])
            await search

    uvloop.run(main())


def test_two_models_behind_one_router() -> None:
    async def main() -> None:
        async with router_cluster([*pair([70], model="one"), *pair([71], model="two", model_id="m2")]) as c:
            await c.until("/v1/models", lambda body: [m["id"] for m in body["data"]] == ["one", "two"])
            for name, node in (("one", c.decode[0]), ("two", c.decode[1])):
                _, answer, _ = await c.post(COMPLETION, BODY | {"model": name})
                assert (answer["model"], answer["pdserve"]["decode_node"]) == (name, node.address)
            status, body, _ = await c.post(COMPLETION, BODY)
            assert (status, body["error"]["param"]) == (404, "model")

    uvloop.run(main())


def test_a_node_given_as_the_wrong_kind_is_not_used() -> None:
    async def main() -> None:
        prefill, decode = pair([70])
        as_decode = (Address("127.0.0.1", prefill.port), Address("127.0.0.1", decode.port))
        async with router_cluster([prefill, decode], prefill=(), decode=as_decode) as c:
            await c.until("/health", lambda body: all(node["up"] for node in body["decode"]))
            health = (await c.get("/health"))[1]
            assert [node["usable"] for node in health["decode"]] == [False, True]
            assert "prefill node" in health["decode"][0]["refused"]

    uvloop.run(main())


def test_the_router_may_start_before_its_nodes() -> None:
    async def main() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        async with router_cluster([], wait_ready=False, decode=(Address("127.0.0.1", port),)) as c:
            assert (await c.get("/health"))[0] == 200
            assert (await c.get("/ready"))[0] == 503
            assert (await c.get("/v1/models")) == (200, {"object": "list", "data": []})
            status, body, headers = await c.post(COMPLETION, BODY | {"model": "any"})
            assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "not_ready", "1")
            node = FakeNode("decode", FILES, tokens=[70], port=port)
            try:
                await c.until("/ready", None)
                assert (await c.post(COMPLETION, BODY))[0] == 200
            finally:
                await node.close()

    uvloop.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_at_its_deadline(stream: bool) -> None:
    async def main() -> None:
        async with router_cluster(pair(manual=True), request_timeout_s=0.1) as c:
            status, body, _ = await c.post(COMPLETION, BODY | {"stream": stream})
            assert (status, body["error"]["code"]) == (504, "deadline")
            half = await soon(c.decode[0].requests)
            assert half.timeout_s == 0.1
            assert await soon(c.prefill[0].aborted) == await soon(c.decode[0].aborted) == half.id

    uvloop.run(main())


@pytest.mark.parametrize("in_time", [True, False])
def test_draining_lets_running_requests_finish_and_refuses_new_ones(in_time: bool) -> None:
    async def main() -> None:
        drain_timeout = 5.0 if in_time else 0.1
        async with router_cluster(pair(manual=True), drain_timeout_s=drain_timeout) as c:
            request = asyncio.create_task(c.post(COMPLETION, BODY | {"max_tokens": 1}))
            half = await soon(c.prefill[0].requests)
            draining = asyncio.create_task(c.server.drain())
            await c.until("/health", lambda body: body["status"] == "draining")
            status, body, _ = await c.post(COMPLETION, BODY)
            assert (status, body["error"]["code"]) == (503, "draining")
            if in_time:
                c.prefill[0].say(half, 0, [70], end=Finished(reason="length"))
            status, body, _ = await request
            assert status == (200 if in_time else 503), json.dumps(body)
            if not in_time:
                assert await soon(c.prefill[0].aborted) == half.id
            await draining

    uvloop.run(main())


def test_an_attempt_that_has_ended_has_nothing_to_say_of_the_routers_end() -> None:
    # Whoever still waits for a node's last word would not let go of the event loop.
    async def main() -> None:
        attempt = Attempt("x", Placed("aggregated", {}))
        attempt.life.stop()
        attempt.fail(RouterDraining())
        assert attempt.poll() is None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(attempt.wait(), 0.001)

    uvloop.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_without_the_log_probabilities_that_were_asked_for_are_a_nodes_fault(stream: bool) -> None:
    async def main() -> None:
        async with router_cluster(pair(manual=True)) as c:
            request = asyncio.create_task(c.post(COMPLETION, BODY | {"logprobs": 1, "stream": stream}))
            half = await soon(c.prefill[0].requests)
            bare = c.prefill[0].output(half, 0, [70]).__class__(id=half.id, position=0, token_ids=[70])
            c.prefill[0].say_all([bare], half.id)
            status, body, _ = await request
            assert (status, body["error"]["code"]) == (500, "internal")
            assert await soon(c.decode[0].aborted) == half.id

    uvloop.run(main())


def test_a_fault_of_the_router_is_one_requests_and_is_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with router_cluster(pair(manual=True)) as c:
            request = asyncio.create_task(c.session.post(c.url + COMPLETION, json=BODY | {"stream": True}))
            half = await soon(c.prefill[0].requests)
            c.prefill[0].say(half, 0, [70])
            answer = await request
            with monkeypatch.context() as patched:
                patched.setattr(OutputProcessor, "process", fault)
                c.decode[0].say(await soon(c.decode[0].requests), 0, [70, 71])
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()
                request = asyncio.create_task(c.session.post(c.url + COMPLETION, json=BODY))
                half = await soon(c.prefill[0].requests)
                c.prefill[0].say(half, 0, [70])
                assert (await (await request).json())["error"]["type"] == "server_error"
            for _ in range(2):
                await soon(c.decode[0].aborted)
            assert caplog.text.count("ZeroDivisionError") >= 2
            assert (await c.get("/health"))[0] == 200

    uvloop.run(main())


def test_a_body_that_never_comes_ends_at_the_deadline() -> None:
    async def main() -> None:
        async with router_cluster(pair(manual=True), request_timeout_s=0.1) as c:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            async with asyncio.timeout(DEADLINE_S):
                assert b" 504 " in await reader.readline()
            writer.close()

    uvloop.run(main())
