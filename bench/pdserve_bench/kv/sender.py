"""The process that writes, and measures: `python -m pdserve_bench.kv.sender`, with a SenderTask on its stdin.

One repetition is all baselines and all pushes of all points, one after the other in an order of its own. The first one
is not counted. Samples go to stdout as they are made.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from pdserve_kv_transfer.connector import Connector, Network
from pdserve_kv_transfer.connectors import ConnectorSpec, make_connector
from pdserve_kv_transfer.ucx import configure_ucx
from pdserve_protocol.codec import Message, encode
from pdserve_protocol.door import Address, cluster_key, connect_door

from pdserve_bench.kv.messages import (
    SENDER_HEARS,
    NixlOpen,
    OpenNixl,
    OpenRegion,
    OpenSocket,
    Refused,
    RegionOpen,
    Sample,
    SenderTask,
    SocketOpen,
)
from pdserve_bench.kv.pushes import ConnectorPush, MoverPush, cache_of, in_large_pages, wire_of
from pdserve_bench.kv.raw import Memcpy, SocketSender
from pdserve_bench.kv.raw_nixl import NixlSender

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from pdserve_bench.kv.config import Point

ANSWER_S = 30.0


class ReceiverRefuses(Exception):
    """The other side cannot open what is needed."""


class Asking:
    """The door of a receiver, or of a host that starts them."""

    def __init__(self, address: Address, key: str | None) -> None:
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = connect_door(self._context, address, key)

    def ask(self, message: Message) -> Any:
        """The answer.

        Raises:
            ReceiverRefuses: there is none, or it says why not.
        """
        self._dealer.send(encode(message))
        if not self._dealer.poll(ANSWER_S * 1000):
            raise ReceiverRefuses(f"no answer from {self._address} in {ANSWER_S:g} s")
        answer = SENDER_HEARS.decode(self._dealer.recv())
        if isinstance(answer, Refused):
            raise ReceiverRefuses(f"{self._address}: {answer.reason}")
        return answer

    def close(self) -> None:
        self._dealer.close(linger=0)
        self._context.destroy(linger=0)


def measures(task: SenderTask, asking: Asking, key: str | None) -> list[tuple[str, Point, Callable[[], float]]]:
    """What is measured in one repetition."""
    connector = make_connector(
        ConnectorSpec(task.way.connector), Network(host=_host_towards(task.host), cluster_key=key)
    )
    found: list[tuple[str, Point, Callable[[], float]]] = []
    pushes = {size: _Pushes(task, asking, connector, size) for size in {point.block_bytes for point in task.points}}
    for point in task.points:
        mine = pushes[point.block_bytes]
        # Each reads memory of its own: what another has just read would be in a cache.
        found.append(("memcpy", point, Memcpy(mine.buffer(point)).measure))
        opened: SocketOpen = asking.ask(OpenSocket(num_bytes=point.num_bytes))
        found.append(("socket", point, SocketSender(mine.buffer(point), task.host, opened.port).measure))
        if task.way.connector == "nixl":
            raw: NixlOpen = asking.ask(OpenNixl(num_bytes=point.num_bytes))
            found.append(("nixl", point, NixlSender(mine.buffer(point), raw.agent, raw.address).measure))
        found.append(("connector", point, ConnectorPush(mine.source, "peer", point).measure))
        found += [(f"mover {dtype}", point, partial(mover.measure, point)) for dtype, mover in mine.movers.items()]
    return found


class _Pushes:
    """Cache, source and movers for blocks of one size."""

    def __init__(self, task: SenderTask, asking: Asking, connector: Connector, block_bytes: int) -> None:
        most = max(point.total_blocks for point in task.points if point.block_bytes == block_bytes)
        self.cache_NB = cache_of(block_bytes, most)
        self.source = connector.source(self.cache_NB)

        def open_region(slot_bytes: int) -> RegionOpen:
            answer: RegionOpen = asking.ask(
                OpenRegion(connector=task.way.connector, num_slots=2 * most, slot_bytes=slot_bytes)
            )
            return answer

        region = open_region(block_bytes).region
        reached = self.source.connect("peer", region)
        if reached is not None:
            reached.result()
        self.movers: dict[str, MoverPush] = {}
        for dtype in task.wire_dtypes:
            wire = wire_of(block_bytes, dtype) if dtype != "auto" else None
            slots = open_region(wire.slot_bytes).region if wire is not None else region
            self.movers[dtype] = MoverPush(self.cache_NB, connector, slots, wire)

    def buffer(self, point: Point) -> npt.NDArray[np.uint8]:
        """A copy of the point's bytes, in one piece."""
        return in_large_pages(self.cache_NB.reshape(-1)[: point.num_bytes])


def _host_towards(host: str) -> str:
    """The address of ours from which ``host`` is reached."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def main() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=SenderTask)
    key = cluster_key(None, os.environ)
    configure_ucx(_host_towards(task.host))
    try:
        found = measures(task, Asking(Address(task.host, task.port), key), key)
    except ReceiverRefuses as error:
        sys.exit(str(error))
    for repetition in range(task.repetitions + 1):
        # What comes just before matters: to processor caches, to clock rates. So each comes after each.
        random.Random(repetition).shuffle(found)
        for what, point, measure in found:
            seconds = measure()
            if repetition:
                line = msgspec.json.encode(Sample(what=what, point=point, seconds=seconds))
                sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()
    # Agents, connections and movers are this process's alone.
    os._exit(0)


if __name__ == "__main__":
    main()
