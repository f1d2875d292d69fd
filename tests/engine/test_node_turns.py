"""A turn of a node's loop: how much it takes in, and what the door is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve_engine.door import Arrived, VisitorSilent
from pdserve_engine.proc import TURN_S
from pdserve_protocol.node import Hello
from pdserve_protocol.requests import AbortRequests, AddRequest
from pdserve_protocol.sampling import SamplingParams
from support.node_world import ROUTER, Node, NodeWorld

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


class Slow:
    """A node that computes a stream, and needs a share of a turn for each request that comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, share: float = 0.4, stream: bool = True) -> None:
        self.world = NodeWorld({"d": "decode"}, max_num_seqs=64, num_blocks=256)
        self.node: Node = self.world.nodes["d"]
        self.added: list[str] = []
        add_request = self.node.engine.core.add_request

        def slowly(message: AddRequest, *rest: Any) -> object:
            self.added.append(message.id)
            self.world.now += share * TURN_S
            return add_request(message, *rest)

        if stream:
            self.add("stream", max_tokens=50)
            self.node.proc._turn()
            assert self.node.busy
        monkeypatch.setattr(self.node.engine.core, "add_request", slowly)

    def add(self, id: str, max_tokens: int = 1) -> None:
        self.world.tokens[id] = {}
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        message = AddRequest(id=id, boot_id=self.node.boot, prompt_token_ids=[1, 2], sampling=sampling)
        self.node.inbox.put(Arrived(ROUTER, message))

    def add_many(self) -> list[str]:
        ids = [f"r{number}" for number in range(20)]
        for id in ids:
            self.add(id)
        return ids


def test_a_stream_goes_on_while_requests_that_take_long_come(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    slow.add_many()
    slow.node.proc._turn()
    assert len(slow.added) == 3
    # The step ends after all those have come, and is not behind them.
    slow.node.engine.executor.complete()
    slow.node.proc._turn()
    assert len(slow.added) == 6
    assert slow.world.tokens["stream"]
    assert slow.node.busy


def test_one_message_is_taken_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, share=5.0)
    slow.add_many()
    for number in range(1, 4):
        slow.node.proc._turn()
        assert len(slow.added) == number


def test_an_idle_node_takes_all_that_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, stream=False)
    ids = slow.add_many()
    slow.node.proc._turn()
    assert slow.added == ids


def test_messages_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    ids = slow.add_many()
    slow.node.inbox.put(Arrived(ROUTER, AbortRequests(ids=ids[1:])))
    slow.node.inbox.put(VisitorSilent(ROUTER))
    slow.add("last")
    while "last" not in slow.added:
        slow.node.proc._turn()
    assert slow.added == [*ids, "last"]
    assert slow.node.engine.scheduler.requests.keys() == {"last"}
