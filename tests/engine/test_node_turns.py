"""The loop of a node tells the door of each message that it has dealt with, not only of a whole turn's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_engine.door import Arrived
from pdserve_protocol.node import Hello
from support.node_world import ROUTER, NodeWorld

if TYPE_CHECKING:
    import pytest


def test_each_message_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeWorld({"p": "prefill"}).nodes["p"]
    did: list[object] = []
    monkeypatch.setattr(node, "send", lambda route, message: did.append("answered"))
    monkeypatch.setattr(node, "taken", did.append)
    for _ in range(3):
        node.inbox.put(Arrived(ROUTER, Hello()))
    node.proc._turn()
    assert did == ["answered", 1] * 3
