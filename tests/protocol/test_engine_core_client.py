"""A connection that ends takes nothing along that the node had said, and nothing is said where nobody is."""

from __future__ import annotations

import asyncio
import select
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
import zmq
from pdserve_protocol.client import EngineCoreClient
from pdserve_protocol.codec import Decoder, Message, encode
from pdserve_protocol.door import Address
from pdserve_protocol.errors import NodeUnreachable
from pdserve_protocol.node import Hello, KVLayout, NodeIdentity, NodeInfo, Ping
from pdserve_protocol.outputs import Outputs, RequestOutput
from pdserve_protocol.requests import AbortRequests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

DEADLINE_S = 10.0
LAYOUT = KVLayout(block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_bytes=1024)


class Node:
    """A bound socket that says what the test says."""

    def __init__(self, boot_id: str, port: int = 0) -> None:
        self.info = NodeInfo(
            identity=NodeIdentity(
                boot_id=boot_id,
                role="decode",
                model_id="m",
                tokenizer_id="t",
                numerics="n",
                layout=LAYOUT,
                digest="d",
                connectors=["c"],
            ),
            served_model_name="m",
            port=1,
            advertise_host=None,
            max_model_len=64,
            kv_capacity_tokens=64,
            vocab_size=8,
            software="s",
        )
        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.rcvtimeo = int(DEADLINE_S * 1000)
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.port = int(self._socket.last_endpoint.rpartition(b":")[2])
        self._decoder = Decoder(Hello | Ping | AbortRequests)

    async def hear(self) -> tuple[bytes, Any]:
        identity, data = await asyncio.get_running_loop().run_in_executor(None, self._socket.recv_multipart)
        return identity, self._decoder.decode(data)

    def say(self, identity: bytes, message: Message) -> None:
        self._socket.send_multipart([identity, encode(message)])

    def close(self) -> None:
        """Ends when everything that was said has left."""
        self._context.destroy(linger=int(DEADLINE_S * 1000))


class Heard:
    """What a client has been told."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.boots: asyncio.Queue[str | None] = asyncio.Queue()

    def on_outputs(self, client: EngineCoreClient, outputs: list[RequestOutput]) -> None:
        self.positions += [output.position for output in outputs]

    def on_change(self, client: EngineCoreClient) -> None:
        self.boots.put_nowait(client.info.identity.boot_id if client.info else None)


@asynccontextmanager
async def connected(node: Node) -> AsyncIterator[tuple[EngineCoreClient, Heard, bytes]]:
    """A client that has heard who ``node`` is, what it is told, and the way to it."""
    heard = Heard()
    client = EngineCoreClient(Address("127.0.0.1", node.port), on_outputs=heard.on_outputs, on_change=heard.on_change)
    await client.start()
    try:
        identity, message = await node.hear()
        assert message == Hello()
        node.say(identity, node.info)
        assert await heard.boots.get() == node.info.identity.boot_id
        yield client, heard, identity
    finally:
        await client.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(main, DEADLINE_S))


def test_last_words_are_heard_however_late_they_are_read() -> None:
    async def main() -> None:
        node = Node("first")
        async with connected(node) as (client, heard, identity):
            for position in range(100):
                node.say(identity, Outputs(outputs=[RequestOutput(id="x", position=position)]))
            node.close()
            # Before anything is read, the client's socket knows that the connection has ended.
            select.select([client._monitor.fd], [], [], DEADLINE_S)
            assert await heard.boots.get() is None
            assert heard.positions == list(range(100))

    run(main())


def test_nothing_is_said_to_a_node_that_is_not_there() -> None:
    async def main() -> None:
        node = Node("first")
        async with connected(node) as (client, heard, _):
            node.close()
            assert await heard.boots.get() is None
            with pytest.raises(NodeUnreachable):
                client.send(AbortRequests(ids=["lost"]))
            again = Node("second", node.port)
            identity, message = await again.hear()
            assert message == Hello()
            again.say(identity, again.info)
            assert await heard.boots.get() == "second"
            client.send(AbortRequests(ids=["new"]))
            assert (await again.hear())[1] == AbortRequests(ids=["new"])
            again.close()

    run(main())


def test_a_silent_node_is_greeted_rarely() -> None:
    async def main() -> None:
        node = Node("first")
        async with connected(node) as (client, heard, identity):
            silent_since = client._last_heard
            for second in range(1, 11):
                client._keep_in_touch(silent_since + second)
            assert await heard.boots.get() is None
            node.say(identity, node.info)
            assert await heard.boots.get() == "first"
            client.send(AbortRequests(ids=["last"]))
            said = [(await node.hear())[1] for _ in range(7)]
            assert said == [Ping()] * 3 + [Hello()] * 3 + [AbortRequests(ids=["last"])]
            node.close()

    run(main())
