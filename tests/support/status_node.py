"""A node that only answers questions about itself: a real door, a fixed status."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import zmq.asyncio
from pdserve_protocol.codec import Decoder, Message, encode
from pdserve_protocol.door import Door
from pdserve_protocol.node import (
    GetStatus,
    Hello,
    KVLayout,
    NodeIdentity,
    NodeInfo,
    NodeLoad,
    NodeStatus,
    Ping,
    PrefixCacheReset,
    ResetPrefixCache,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LAYOUT = KVLayout(block_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_bytes=368640)
STATUS = NodeStatus(
    info=NodeInfo(
        identity=NodeIdentity(
            boot_id="boot-1",
            role="decode",
            model_id="m" * 32,
            tokenizer_id="t" * 32,
            numerics="torch-2.13-bfloat16",
            layout=LAYOUT,
            digest="xxh3-128",
            connectors=["nixl"],
        ),
        served_model_name="smollm2",
        port=7002,
        advertise_host=None,
        max_model_len=8192,
        kv_capacity_tokens=1600,
        vocab_size=49152,
        software="pdserve 0.1.0",
    ),
    load=NodeLoad(
        boot_id="boot-1",
        draining=False,
        running=2,
        waiting=1,
        handoffs=3,
        blocks_total=100,
        blocks_free=50,
        blocks_cached=30,
        blocks_held=5,
        blocks_in_use=15,
    ),
    uptime_s=3725.5,
    counters={"generated_tokens": 12345.0, "transfer_s": 1.25},
    peers={"127.0.0.1:7001": "up"},
)


@contextlib.asynccontextmanager
async def status_node(
    *, status: NodeStatus = STATUS, reset: PrefixCacheReset | None = None, cluster_key: str | None = None
) -> AsyncIterator[int]:
    """Serves until the block ends; yields the port."""
    context = zmq.asyncio.Context()
    door = Door(context, "127.0.0.1", 0, cluster_key)  # type: ignore[arg-type]
    decoder = Decoder(Hello | Ping | GetStatus | ResetPrefixCache)
    answers: dict[type[Message], Message] = {
        Hello: status.info,
        Ping: status.load,
        GetStatus: status,
        ResetPrefixCache: reset or PrefixCacheReset(blocks_forgotten=30, blocks_left=0),
    }

    async def serve() -> None:
        socket: zmq.asyncio.Socket = door.socket  # type: ignore[assignment]
        while True:
            peer, data = await socket.recv_multipart()
            await socket.send_multipart([peer, encode(answers[type(decoder.decode(data))])])

    task = asyncio.create_task(serve())
    try:
        yield door.port
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        door.close()
        context.destroy(linger=0)
