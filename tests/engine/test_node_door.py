"""The door of a node goes on whatever address it is told to speak to, and an order to a dead one does not wait."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
from pdserve_engine.door import Arrived, DoorDied, NodeDoor
from pdserve_protocol.codec import encode
from pdserve_protocol.door import Address, connect_door
from pdserve_protocol.errors import AddressError
from pdserve_protocol.node import Hello, NodeLoad, Ping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve_engine.door import DoorEvent

LOAD = NodeLoad(
    boot_id="b",
    draining=False,
    running=0,
    waiting=0,
    handoffs=0,
    blocks_total=1,
    blocks_free=1,
    blocks_cached=0,
    blocks_held=0,
    blocks_in_use=0,
)


@pytest.fixture
def inbox() -> queue.SimpleQueue[DoorEvent]:
    return queue.SimpleQueue()


@pytest.fixture
def door(inbox: queue.SimpleQueue[DoorEvent]) -> Iterator[NodeDoor]:
    door = NodeDoor("127.0.0.1", 0, None, inbox.put)
    door.start(LOAD)
    yield door
    door.close()


@pytest.mark.parametrize("address", [Address("no host!", 7002), Address("127.0.0.1", 10**7), Address("", 0)], ids=str)
def test_an_impossible_address_of_a_peer(door: NodeDoor, inbox: queue.SimpleQueue[DoorEvent], address: Address) -> None:
    door.send(address, Ping())
    door.disconnect(address)
    with zmq.Context() as context, connect_door(context, Address("127.0.0.1", door.port), None) as dealer:
        dealer.linger = 0
        dealer.send(encode(Hello()))
        event = inbox.get(timeout=5)
    assert isinstance(event, Arrived), event


def test_a_dead_door_does_not_hold_up_those_who_order(
    door: NodeDoor, inbox: queue.SimpleQueue[DoorEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(NodeDoor, "_drop", fail)
    door.disconnect(Address("127.0.0.1", 1))
    event = inbox.get(timeout=5)
    assert isinstance(event, DoorDied)
    for _ in range(3):
        door.send(Address("127.0.0.1", 1), Ping())


def test_orders_are_carried_out_in_order_however_many(door: NodeDoor, inbox: queue.SimpleQueue[DoorEvent]) -> None:
    with zmq.Context() as context, connect_door(context, Address("127.0.0.1", door.port), None) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 5000
        dealer.rcvhwm = 0
        dealer.send(encode(Hello()))
        visitor = inbox.get(timeout=5)
        assert isinstance(visitor, Arrived)
        # More than a queue of ZMQ holds, while a peer that is not there is spoken to as well.
        for number in range(3000):
            door.send(visitor.route, msgspec.structs.replace(LOAD, running=number))
            door.send(Address("127.0.0.1", 1), Ping())
            if number % 100 == 0:
                assert msgspec.msgpack.decode(dealer.recv(), type=NodeLoad).running == number // 100
        told = [msgspec.msgpack.decode(dealer.recv(), type=NodeLoad).running for _ in range(3000 - 30)]
        assert told == [*range(30, 3000)]


def test_what_was_said_before_the_end_is_sent(door: NodeDoor, inbox: queue.SimpleQueue[DoorEvent]) -> None:
    with zmq.Context() as context, connect_door(context, Address("127.0.0.1", door.port), None) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 5000
        dealer.send(encode(Hello()))
        visitor = inbox.get(timeout=5)
        assert isinstance(visitor, Arrived)
        for number in range(100):
            door.send(visitor.route, msgspec.structs.replace(LOAD, running=number))
        door.close()
        for number in range(100):
            assert msgspec.msgpack.decode(dealer.recv(), type=NodeLoad).running == number


def test_a_dealer_to_an_impossible_address() -> None:
    with zmq.Context() as context, pytest.raises(AddressError):
        connect_door(context, Address("no host!", 7002), None)
