"""Requests made from a router's own OpenAPI document, valid ones and bent ones, against fake nodes.

python tests/fuzz_api.py 2000
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import requests
import schemathesis
import uvloop
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support.router_cluster import pair, router_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
ANSWER_S = 10.0


@contextmanager
def served(tokens: list[int]) -> Iterator[str]:
    """A router over fake nodes in a thread of its own; its URL. At the end nothing may run any more."""
    started: list[str] = []
    ready, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        async with router_cluster(pair(tokens)) as cluster:
            loops.append(asyncio.get_running_loop())
            started.append(cluster.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=uvloop.run, args=(main(),))
    thread.start()
    try:
        assert ready.wait(ANSWER_S)
        yield started[0]
        assert "requests_running 0.0" in requests.get(f"{started[0]}/metrics", timeout=ANSWER_S).text
    finally:
        if loops:
            loops[0].call_soon_threadsafe(stop.set)
        thread.join(ANSWER_S)


def fuzz(url: str, number: int, *, fixed_seed: int | None = None) -> int:
    """Send about ``number`` requests and check each answer; how many were sent.

    Raises:
        AssertionError, schemathesis' failures: an answer that the document does not promise.
    """
    schema = schemathesis.openapi.from_dict(requests.get(f"{url}/openapi.json", timeout=ANSWER_S).json())
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    operations = [found.ok() for found in schema.get_all_operations()]
    posts = [o for o in operations if o.method.upper() == "POST"]
    gets = [o for o in operations if o.method.upper() == "GET"]
    cases = st.one_of(
        [o.as_strategy(generation_mode=mode) for o in posts for mode in modes]
        + [o.as_strategy(generation_mode=modes[0]) for o in gets]
    )
    sent: list[Any] = []
    with requests.Session() as session:

        @settings(
            max_examples=number,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def send(case: schemathesis.Case) -> None:
            response = case.call(base_url=url, session=session, timeout=ANSWER_S)
            sent.append(response.status_code)
            case.validate_response(response, checks=list(CHECKS))

        (send if fixed_seed is None else seed(fixed_seed)(send))()
    return len(sent)
