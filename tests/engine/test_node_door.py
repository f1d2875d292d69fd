"""The door of a node goes on whatever address it is told to speak to, and an order to a dead one does not wait."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
from pdserve_engine.door import MAX_UNTAKEN, Arrived, DoorDied, NodeDoor
from pdserve_protocol.codec import encode
from pdserve_protocol.door import Address, connect_door
from pdserve_protocol.errors import AddressError
from pdserve_protocol.node import GetStatus, Hello, NodeLoad, Ping
from pdserve_protocol.requests import AbortRequests
from support.flood import flooded

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


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_what_nobody_takes_is_bounded_and_not_lost(
    door: NodeDoor, inbox: queue.SimpleQueue[DoorEvent], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("pdserve_engine.door.MAX_UNTAKEN_BYTES", 20 << 20)
    most = 20 if size > 10 else MAX_UNTAKEN
    with zmq.Context() as context, connect_door(context, Address("127.0.0.1", door.port), None) as dealer:
        dealer.linger = 0
        number = 2 * most + 7
        for index in range(number):
            dealer.send(encode(AbortRequests(ids=[str(index), "x" * size])))
        ids: list[str] = []
        for _ in range(3):
            events = [inbox.get(timeout=5) for _ in range(min(most, number - len(ids)))]
            # The door goes on with all else, and with visitors when these are taken.
            heard = threading.Event()
            door._order(heard.set)
            assert heard.wait(5)
            assert inbox.empty()
            for event in events:
                assert isinstance(event, Arrived)
                assert isinstance(event.message, AbortRequests)
                ids.append(event.message.ids[0])
            door.taken(len(events))
        assert ids == [str(index) for index in range(number)]


def test_a_visitor_who_floods_does_not_hold_up_another(door: NodeDoor, inbox: queue.SimpleQueue[DoorEvent]) -> None:
    def serve() -> None:
        """As the engine loop does."""
        while (event := inbox.get()) is not None:
            assert isinstance(event, Arrived)
            if isinstance(event.message, GetStatus):
                door.send(event.route, LOAD)
            door.taken(1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with (
            zmq.Context() as context,
            connect_door(context, Address("127.0.0.1", door.port), None) as dealer,
            flooded(door.port),
        ):
            dealer.linger, dealer.rcvtimeo = 0, 2000
            for _ in range(10):
                for question in (GetStatus(), Ping()):
                    dealer.send(encode(question))
                    assert msgspec.msgpack.decode(dealer.recv(), type=NodeLoad) == LOAD
    finally:
        inbox.put(None)  # type: ignore[arg-type]
        thread.join()


def test_a_dealer_to_an_impossible_address() -> None:
    with zmq.Context() as context, pytest.raises(AddressError):
        connect_door(context, Address("no host!", 7002), None)
