"""A request that reaches a node after the router has given it up, because the network between them was gone."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from support.router_cluster import DEADLINE_S, pair, router_cluster


@pytest.mark.slow
def test_a_node_that_was_out_of_reach_is_told_what_was_given_up() -> None:
    async def main() -> None:
        async with router_cluster(pair(manual=True)) as c, asyncio.timeout(DEADLINE_S):
            request = asyncio.create_task(c.post("/v1/completions", {"prompt": "x", "max_tokens": 9}))
            half = await c.decode[0].requests.get()
            c.decode[0].mute = True
            status, body, _ = await request
            assert (status, body["error"]["code"]) == (503, "node_lost")
            assert await c.prefill[0].aborted.get() == half.id
            assert c.decode[0].aborted.empty()
            c.decode[0].mute = False
            assert await c.decode[0].aborted.get() == half.id
            await c.until("/health", lambda body: body["pair"])
            assert c.prefill[0].aborted.empty()
            assert c.decode[0].aborted.empty()

    uvloop.run(main())
