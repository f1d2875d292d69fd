"""A router with fake nodes, all real sockets, on one event loop."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from pdserve_protocol.door import Address
from pdserve_router.args import RouterConfig
from pdserve_router.main import RouterServer

from support.fake_node import FakeNode
from support.tokenizers import tiny_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

FILES = tiny_tokenizer_files()
DEADLINE_S = 10.0


class RouterCluster:
    def __init__(self, url: str, server: RouterServer, session: aiohttp.ClientSession, nodes: list[FakeNode]) -> None:
        self.url = url
        self.server = server
        self.session = session
        self.prefill = [node for node in nodes if node.role == "prefill"]
        self.decode = [node for node in nodes if node.role == "decode"]

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Status, JSON and headers of the answer."""
        data = body if isinstance(body, bytes | io.BytesIO) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream, the last one perhaps "[DONE]"."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            return parse_events(await answer.read())

    async def until(self, path: str, wanted: Any, *, status: int = 200) -> Any:
        """Ask until the answer has ``status`` and contains ``wanted``; the body."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                got, body = await self.get(path)
                if got == status and (wanted is None or wanted(body)):
                    return body
                await asyncio.sleep(0.01)


def free_port() -> int:
    """One that nobody has now: for a node that comes later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def parse_events(data: bytes) -> list[Any]:
    events = data.decode().split("\n\n")
    assert events.pop() == "", "the last event is not complete"
    assert all(event.startswith("data: ") for event in events)
    return [event if event == "[DONE]" else json.loads(event) for event in (e.removeprefix("data: ") for e in events)]


@asynccontextmanager
async def router_cluster(
    nodes: Sequence[FakeNode], *, wait_ready: bool = True, degraded: bool = False, **config: Any
) -> AsyncIterator[RouterCluster]:
    """A router in front of ``nodes``, which it closes at the end. ``degraded``: no two of them make a pair."""
    settings: dict[str, Any] = {
        "prefill": tuple(Address("127.0.0.1", n.port) for n in nodes if n.role == "prefill"),
        "decode": tuple(Address("127.0.0.1", n.port) for n in nodes if n.role == "decode"),
        "host": "127.0.0.1",
        "port": 0,
        "tokenizer": None,
        "local_prefill": "never",
        "cluster_key": None,
        "request_timeout_s": 60.0,
        "drain_timeout_s": 5.0,
        "log_level": "info",
    }
    async with AsyncExitStack() as stack:
        for node in nodes:
            stack.push_async_callback(node.close)
        server = RouterServer(RouterConfig(**settings | config))
        stack.push_async_callback(server.close)
        url = await server.start()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        cluster = RouterCluster(url, server, session, list(nodes))
        if wait_ready:
            await cluster.until(
                "/health", lambda body: sum(node["up"] for node in body["prefill"] + body["decode"]) >= len(nodes)
            )
            await cluster.until("/ready", lambda body: body["degraded"] is degraded)
        yield cluster


def pair(tokens: Sequence[int] = (), **options: Any) -> list[FakeNode]:
    """One prefill and one decode node that say the same."""
    return [FakeNode(role, FILES, tokens=tokens, **options) for role in ("prefill", "decode")]  # type: ignore[arg-type]
