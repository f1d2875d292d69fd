"""The process that is written to: `python -m pdserve_bench.kv.receiver HOST`, with the cluster key in the environment.

Prints its port, opens what it is asked for, and ends when its stdin does.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from typing import TYPE_CHECKING

import zmq
from pdserve_kv_transfer.connector import Network
from pdserve_kv_transfer.connectors import ConnectorSpec, make_connector
from pdserve_kv_transfer.errors import TransferError
from pdserve_kv_transfer.landing import LandingZone
from pdserve_kv_transfer.ucx import configure_ucx
from pdserve_protocol.codec import Message, encode
from pdserve_protocol.door import Door, cluster_key
from pdserve_protocol.errors import BadMessage
from pdserve_protocol.handoff import Region

from pdserve_bench.kv.messages import (
    RECEIVER_HEARS,
    NixlOpen,
    OpenNixl,
    OpenRegion,
    OpenSocket,
    Refused,
    RegionOpen,
    SocketOpen,
)
from pdserve_bench.kv.raw import SocketReceiver
from pdserve_bench.kv.raw_nixl import NixlReceiver

if TYPE_CHECKING:
    from pdserve_kv_transfer.connector import TargetConnector


class Receiver:
    """What has been opened for a sender."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._targets: dict[str, TargetConnector] = {}
        self._kept: list[object] = []

    def answer(self, message: Message) -> Message:
        try:
            return self._answer(message)
        except (TransferError, OSError, ImportError) as error:
            return Refused(reason=str(error))

    def _answer(self, message: Message) -> Message:
        match message:
            case OpenRegion(connector=connector, num_slots=num_slots, slot_bytes=slot_bytes):
                zone = LandingZone(num_slots, slot_bytes)
                # As it is in a node that has served for a while: its pages exist.
                zone.memory_SB[:] = 0
                self._kept.append(zone)
                name = f"region-{uuid.uuid4().hex}"
                metadata = self._target(connector).open_region(name, zone.memory_SB)
                return RegionOpen(Region(name=name, num_slots=num_slots, slot_bytes=slot_bytes, metadata=metadata))
            case OpenSocket(num_bytes=num_bytes):
                return SocketOpen(SocketReceiver(self._network.host, num_bytes).port)
            case OpenNixl(num_bytes=num_bytes):
                configure_ucx(self._network.host)
                raw = NixlReceiver(num_bytes)
                self._kept.append(raw)
                return NixlOpen(raw.metadata, raw.address)
            case _:
                return Refused(reason="a receiver does not do that")

    def _target(self, connector: str) -> TargetConnector:
        if connector not in self._targets:
            self._targets[connector] = make_connector(ConnectorSpec(connector), self._network).target()
        return self._targets[connector]


def main(host: str) -> None:
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    key = cluster_key(None, os.environ)
    receiver = Receiver(Network(host=host, cluster_key=key))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    door = Door(context, host, 0, key)
    print(door.port, flush=True)
    while True:
        identity, payload = door.socket.recv_multipart()
        try:
            answer = receiver.answer(RECEIVER_HEARS.decode(payload))
        except BadMessage as error:
            answer = Refused(reason=str(error))
        door.socket.send_multipart([identity, encode(answer)])


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    # Regions, agents and the door are this process's alone.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
