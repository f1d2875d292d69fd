"""A decode node computes prompts itself while prefill nodes are busy, and says why."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvloop
from support.fake_node import FakeNode
from support.router_cluster import DEADLINE_S, FILES, RouterCluster, pair, router_cluster

if TYPE_CHECKING:
    from pdserve_protocol.requests import AddRequest

COMPLETION = "/v1/completions"
BODY = {"model": "fake", "prompt": [70] * 20, "max_tokens": 2}


async def soon(requests: asyncio.Queue[AddRequest]) -> AddRequest:
    return await asyncio.wait_for(requests.get(), DEADLINE_S)


async def burst(c: RouterCluster) -> tuple[list[asyncio.Task], list[AddRequest], list[AddRequest]]:
    """Three requests at a time, of which the decode node has the last one alone; it is not said to be slow."""
    tasks, prefills, decodes = [], [], []
    for number in range(3):
        tasks.append(asyncio.create_task(c.post(COMPLETION, BODY)))
        decodes.append(await soon(c.decode[0].requests))
        if number < 2:
            prefills.append(await soon(c.prefill[0].requests))
    assert [request.receive_from is None for request in decodes] == [False, False, True]
    return tasks, prefills, decodes


async def serve_one(c: RouterCluster) -> dict:
    """The proof of a request that comes alone."""
    task = asyncio.create_task(c.post(COMPLETION, BODY))
    decode = await soon(c.decode[0].requests)
    if decode.receive_from is not None:
        c.prefill[0].answer(await soon(c.prefill[0].requests))
    c.decode[0].answer(decode)
    _, answer, _ = await task
    return answer["pdserve"]


def test_a_burst_is_shared_and_an_idle_prefill_node_gets_what_comes_next() -> None:
    async def main() -> None:
        async with router_cluster(pair([70, 71], manual=True), local_prefill="auto") as c:
            tasks, prefills, decodes = await burst(c)
            for request in prefills:
                c.prefill[0].answer(request)
            for request in decodes:
                c.decode[0].answer(request)
            proofs = [(await task)[1]["pdserve"] for task in tasks]
            assert [(p["mode"], p["reason"]) for p in proofs] == [
                ("disaggregated", None),
                ("disaggregated", None),
                ("aggregated", "prefill_busy"),
            ]
            assert (proofs[2]["prefill_node"], proofs[2]["decode_node"]) == (None, c.decode[0].address)
            assert 'fallbacks_total{reason="prefill_busy"} 1.0' in (await c.get("/metrics"))[1]
            assert (await serve_one(c))["mode"] == "disaggregated"

    uvloop.run(main())


def test_prompts_of_clients_that_have_left_are_not_waited_for() -> None:
    async def main() -> None:
        async with router_cluster(pair([70, 71], manual=True), local_prefill="auto") as c:
            tasks, _, _ = await burst(c)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for _ in tasks:
                await asyncio.wait_for(c.decode[0].aborted.get(), DEADLINE_S)
            assert (await serve_one(c))["mode"] == "disaggregated"

    uvloop.run(main())


def test_prompts_that_the_prefill_node_has_cached_stay_there() -> None:
    async def main() -> None:
        async with router_cluster(pair([70, 71], manual=True), local_prefill="auto") as c:
            first = asyncio.create_task(c.post(COMPLETION, {**BODY, "max_tokens": 1}))
            c.prefill[0].answer(await soon(c.prefill[0].requests))
            assert (await first)[1]["pdserve"]["cached_tokens"]["prefill"] > 0
            tasks = [asyncio.create_task(c.post(COMPLETION, BODY)) for _ in range(4)]
            for request in [await soon(c.prefill[0].requests) for _ in tasks]:
                c.prefill[0].answer(request)
            for _ in tasks:
                c.decode[0].answer(await soon(c.decode[0].requests))
            assert {(await task)[1]["pdserve"]["mode"] for task in tasks} == {"disaggregated"}

    uvloop.run(main())


def test_never() -> None:
    async def main() -> None:
        async with router_cluster(pair([70, 71], manual=True), local_prefill="never") as c:
            tasks = [asyncio.create_task(c.post(COMPLETION, BODY)) for _ in range(8)]
            for _ in tasks:
                c.prefill[0].answer(await soon(c.prefill[0].requests))
                c.decode[0].answer(await soon(c.decode[0].requests))
            for task in tasks:
                assert (await task)[1]["pdserve"]["mode"] == "disaggregated"

    uvloop.run(main())


def test_the_prefill_node_that_has_less_to_do_is_asked() -> None:
    async def main() -> None:
        nodes = [FakeNode("prefill", FILES, tokens=[70, 71], manual=True) for _ in range(2)]
        nodes.append(FakeNode("decode", FILES, tokens=[70, 71], manual=True))
        async with router_cluster(nodes, local_prefill="never") as c:
            await c.until("/health", lambda body: all(node["usable"] for node in body["prefill"]))
            long = asyncio.create_task(c.post(COMPLETION, {**BODY, "prompt": [70] * 100}))
            waiting = await soon(nodes[0].requests)
            short = [asyncio.create_task(c.post(COMPLETION, BODY)) for _ in range(3)]
            for _ in short:
                nodes[1].answer(await soon(nodes[1].requests))
            nodes[0].answer(waiting)
            for _ in (long, *short):
                nodes[2].answer(await soon(nodes[2].requests))
            await asyncio.gather(long, *short)

    uvloop.run(main())
