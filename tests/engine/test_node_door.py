"""The door of a node goes on whatever it is told, by us or by others, and is fair to all of them."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
from pdserve_engine.door import MAX_HEARD, MAX_MESSAGES_A_TURN, MAX_UNTAKEN, Arrived, DoorDied, NodeDoor, VisitorSilent
from pdserve_protocol.codec import encode
from pdserve_protocol.door import Address, connect_door
from pdserve_protocol.errors import AddressError
from pdserve_protocol.handoff import Cancel, PeerMessage
from pdserve_protocol.node import GetStatus, Hello, NodeLoad, Ping
from pdserve_protocol.requests import AbortRequests
from pdserve_protocol.timing import DEAD_AFTER_S, PING_INTERVAL_S
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


ABORT = encode(AbortRequests(ids=["a"]))
CANCEL = encode(PeerMessage(from_boot="p", to_boot="b", from_sender=True, body=Cancel(id="a")))


class Clock:
    """Time as the test tells it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def inbox() -> queue.SimpleQueue[DoorEvent]:
    return queue.SimpleQueue()


@pytest.fixture
def door(inbox: queue.SimpleQueue[DoorEvent]) -> Iterator[NodeDoor]:
    door = NodeDoor("127.0.0.1", 0, None, inbox.put)
    door.start(LOAD)
    yield door
    door.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pdserve_engine.door.time.monotonic", clock)
    return clock


@pytest.fixture
def still(inbox: queue.SimpleQueue[DoorEvent], clock: Clock) -> Iterator[NodeDoor]:
    """A door without its thread: the test takes its turns."""
    door = NodeDoor("127.0.0.1", 0, None, inbox.put)
    door._load = encode(LOAD)
    yield door
    door.close()


def fill(door: NodeDoor) -> None:
    """As much as may wait for the loop, from one visitor."""
    while not door._has_many_untaken():
        door._on_visit([b"busy", ABORT])
    door._pause()
    assert door._paused


def silent(inbox: queue.SimpleQueue[DoorEvent]) -> list[bytes]:
    events = [inbox.get_nowait() for _ in range(inbox.qsize())]
    return [event.visitor.identity for event in events if isinstance(event, VisitorSilent)]


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


def test_a_paused_door_shows_life_once_a_second(still: NodeDoor, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, bytes]] = []
    monkeypatch.setattr(still, "_answer", lambda identity, payload: told.append((clock.now, identity)))
    still._on_visit([b"router", encode(Hello())])
    fill(still)
    still.broadcast_load()
    still._turn()
    told.clear()
    began = clock.now
    for _ in range(20):
        clock.now += 0.125
        # Pauses may be short, if there are many.
        still.taken(1)
        still._carry_out_orders()
        fill(still)
        still._order(lambda: None)
        still._turn()
    at = [when - began for when, identity in told if identity == b"router"]
    assert at == [PING_INTERVAL_S, 2 * PING_INTERVAL_S]


def test_a_router_hears_of_a_node_that_takes_nothing(door: NodeDoor) -> None:
    with zmq.Context() as context, connect_door(context, Address("127.0.0.1", door.port), None) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 5000
        for _ in range(MAX_UNTAKEN):
            dealer.send(ABORT)
        dealer.send(encode(Ping()))
        assert msgspec.msgpack.decode(dealer.recv(), type=NodeLoad) == LOAD
        assert door._paused


def test_many_short_pauses_do_not_hide_a_dead_router(
    still: NodeDoor, inbox: queue.SimpleQueue[DoorEvent], clock: Clock
) -> None:
    still._on_visit([b"dead", encode(Ping())])
    listened = 0.0
    while listened <= DEAD_AFTER_S:
        fill(still)
        clock.now += 1 / 1024
        still.taken(64)
        still._carry_out_orders()
        assert not still._paused
        still._notice_silence()
        assert silent(inbox) == []
        clock.now += 0.125
        listened += 0.125
    still._notice_silence()
    assert silent(inbox) == [b"dead"]


def test_nobody_is_silent_because_of_a_long_pause(
    still: NodeDoor, inbox: queue.SimpleQueue[DoorEvent], clock: Clock
) -> None:
    still._on_visit([b"router", encode(Ping())])
    clock.now += DEAD_AFTER_S - 0.1
    fill(still)
    clock.now += 60.0
    still._notice_silence()
    still.taken(MAX_UNTAKEN)
    still._carry_out_orders()
    still._notice_silence()
    assert silent(inbox) == []
    clock.now += 0.2
    still._notice_silence()
    assert silent(inbox) == [b"router"]


def test_how_many_are_remembered_is_bounded(still: NodeDoor, inbox: queue.SimpleQueue[DoorEvent]) -> None:
    still._on_visit([b"junk", b"junk"])
    for number in range(MAX_HEARD):
        still._on_visit([b"%d" % number, encode(Ping())])
    still._on_visit([b"0", encode(Ping())])
    still._notice_silence()
    assert silent(inbox) == []
    still._on_visit([b"one more", encode(Ping())])
    still._notice_silence()
    assert len(still._heard) == MAX_HEARD
    assert silent(inbox) == [b"1"]


@pytest.fixture
def peer(still: NodeDoor) -> Iterator[tuple[Address, zmq.Socket[bytes], bytes]]:
    """A peer that the door goes to: its address, its socket, and what it calls us."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.rcvtimeo = 0, 5000
        address = Address("127.0.0.1", router.bind_to_random_port("tcp://127.0.0.1"))
        still.send(address, Ping())
        still._turn()
        yield address, router, router.recv_multipart()[0]


def test_a_peer_who_floods_is_read_like_everybody_else(
    still: NodeDoor, inbox: queue.SimpleQueue[DoorEvent], peer: tuple[Address, zmq.Socket[bytes], bytes]
) -> None:
    _, router, us = peer
    for _ in range(MAX_UNTAKEN + 5):
        router.send_multipart([us, CANCEL])
    # A turn waits for half a second where there is somebody to be missed.
    still._on_visit([b"router", encode(Ping())])
    for number in (MAX_UNTAKEN, MAX_UNTAKEN + 3):
        while not still._paused:
            before = inbox.qsize()
            still._turn()
            assert still._paused or before < inbox.qsize() <= before + MAX_MESSAGES_A_TURN
        assert inbox.qsize() == number
        still.taken(3)
        still._carry_out_orders()


def test_visitors_and_peers_take_turns_where_there_is_room_for_one_message(
    still: NodeDoor, inbox: queue.SimpleQueue[DoorEvent], peer: tuple[Address, zmq.Socket[bytes], bytes]
) -> None:
    address, router, us = peer
    with zmq.Context() as context, connect_door(context, Address("127.0.0.1", still.port), None) as dealer:
        dealer.linger = 0
        for _ in range(20):
            router.send_multipart([us, CANCEL])
            dealer.send(ABORT)
        for socket in still._sockets.values():
            assert socket.poll(5000)
        fill(still)
        silent(inbox)
        came = []
        for _ in range(6):
            still.taken(1)
            still._turn()
            still._turn()
            event = inbox.get_nowait()
            assert isinstance(event, Arrived)
            assert inbox.empty()
            came.append(event.route == address)
    assert came in ([True, False] * 3, [False, True] * 3)


def test_a_dealer_to_an_impossible_address() -> None:
    with zmq.Context() as context, pytest.raises(AddressError):
        connect_door(context, Address("no host!", 7002), None)
