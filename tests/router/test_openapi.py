"""The OpenAPI document is true: every route is in it, and answers to requests made from it are as it promises."""

from __future__ import annotations

import json

import pytest
import uvloop
from pdserve_router.openapi import OPERATIONS, document
from support.api_fuzz import fuzz, served
from support.router_cluster import pair, router_cluster


def test_every_route_is_documented_and_served() -> None:
    async def main() -> None:
        async with router_cluster(pair()) as c:
            assert (await c.get("/openapi.json"))[1] == json.loads(document())
            routes = {
                (route.method.lower(), route.resource.canonical)
                for route in c.server._runner.app.router.routes()
                if route.resource is not None and route.method != "HEAD"
            }
            assert routes == {(o.method, o.path) for o in OPERATIONS}

    uvloop.run(main())


def test_ranges_are_those_that_are_checked() -> None:
    schemas = json.loads(document())["components"]["schemas"]
    temperature = schemas["ChatBody"]["properties"]["temperature"]["anyOf"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in temperature
    assert schemas["ChatBody"]["required"] == ["messages"]
    assert set(schemas) >= {"CompletionBody", "ChatBody", "ResponsesBody", "ChatCompletion", "Response", "ErrorAnswer"}


@pytest.mark.slow
def test_requests_made_from_the_document() -> None:
    with served([70, 71, 72]) as url:
        assert fuzz(url, 150, fixed_seed=1) >= 100
