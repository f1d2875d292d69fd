"""Messages to other nodes go wrong by the seed; everything else is left alone."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest
from pdserve_engine import faulty_door
from pdserve_engine.door import NodeDoor, Visitor
from pdserve_engine.faulty_door import FaultyDoor, open_door
from pdserve_kv_transfer.faults import Faults
from pdserve_protocol.handoff import Cancel, PeerMessage
from pdserve_protocol.node import Ping
from pdserve_protocol.outputs import Outputs

if TYPE_CHECKING:
    from pdserve_protocol.codec import Message

ROUTE = Visitor(b"peer")


def peer_message(number: int) -> PeerMessage:
    return PeerMessage(from_boot="a", to_boot="b", from_sender=False, link=number, body=Cancel(id="r"))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """What an ordinary door was asked to send."""
    messages: list[Message] = []
    monkeypatch.setattr(NodeDoor, "send", lambda self, route, message: messages.append(message))
    return messages


def run(faults: Faults, num_messages: int = 100) -> FaultyDoor:
    door = open_door("127.0.0.1", 0, None, lambda event: None, [None, Faults(drop=1.0), faults])
    assert isinstance(door, FaultyDoor)
    for number in range(num_messages):
        door.send(ROUTE, peer_message(number))
    return door


def links(sent: list[Message]) -> list[int]:
    return [message.link for message in sent if isinstance(message, PeerMessage)]


def test_some_are_lost(sent: list[Message]) -> None:
    run(Faults(seed=1, lose=0.2)).close()
    assert 65 < len(sent) < 95
    assert links(sent) == sorted(set(links(sent)))


def test_some_come_twice(sent: list[Message]) -> None:
    run(Faults(seed=1, repeat=0.2)).close()
    assert 105 < len(sent) < 135
    assert set(links(sent)) == set(range(100))


def test_late_ones_leave_out_of_order(sent: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(faulty_door.time, "monotonic", lambda: next(clock) * 1e-4)
    door = run(Faults(seed=1, late_ms=5))
    while len(sent) < 100:
        door.set_load(Ping())
    door.close()
    assert sorted(links(sent)) == list(range(100)) != links(sent)


def test_what_routers_are_told_is_left_alone(sent: list[Message]) -> None:
    door = run(Faults(lose=1.0), num_messages=3)
    door.send(ROUTE, Outputs(outputs=[]))
    door.close()
    assert sent == [Outputs(outputs=[])]


def test_a_node_without_a_drill_has_an_ordinary_door() -> None:
    door = open_door("127.0.0.1", 0, None, lambda event: None, [None, Faults(corrupt=1.0)])
    assert type(door) is NodeDoor
    door.close()
