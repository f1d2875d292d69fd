"""When blocks are granted to a hand-off, over a real scheduler and links, with a door and a mover that only listen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from pdserve_decode_node.policy import GrantWhenRoom
from pdserve_engine.door import Visitor
from pdserve_engine.receiving import Receiving
from pdserve_engine.request import RequestStatus
from pdserve_kv_transfer.events import RegionOpened
from pdserve_protocol.handoff import Grant, LinkHello, Offer, PeerMessage, Region
from pdserve_protocol.node import KVLayout, NodeIdentity
from support.engines import BLOCK, RECEIVE, Engine

if TYPE_CHECKING:
    from pdserve_engine.kv_cache_manager import BlockUsage
    from pdserve_kv_transfer.receiver import GrantPolicy

LAYOUT = KVLayout(block_size=BLOCK, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_bytes=32)
D = NodeIdentity(
    boot_id="d",
    role="decode",
    model_id="m",
    tokenizer_id="t",
    numerics="n",
    layout=LAYOUT,
    digest="x",
    connectors=["c"],
)
P = msgspec.structs.replace(D, boot_id="p", role="prefill")


class Listener:
    """Takes any order and keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, route: object, message: PeerMessage) -> None:
        self.sent.append(message.body)

    def open_region(self, peer: str, connector: str, wire: object) -> None:
        self.sent.append(("open_region", peer))

    def populate(self, blocks: object) -> None:
        pass


class Always:
    when: GrantPolicy = "offer"

    def may_grant(self, num_blocks: int, usage: BlockUsage, num_running: int) -> bool:
        return True


class Receiver:
    """Receiving of an engine, with one sender that has introduced itself."""

    def __init__(self, engine: Engine, policy: Always | GrantWhenRoom) -> None:
        self._engine, self._listener = engine, Listener()
        self.receiving = Receiving(
            engine.core,
            self._listener,
            self._listener,
            D,
            policy,
            lambda output: None,
            engine.note,  # type: ignore[arg-type]
        )
        self._say(LinkHello(identity=P))
        region = Region(name="r", num_slots=8, slot_bytes=32, metadata=b"")
        self.receiving.on_mover_event(RegionOpened("from/p", region), engine.tick())

    def _say(self, body: LinkHello | Offer) -> None:
        message = PeerMessage(from_boot="p", to_boot="d", from_sender=True, link=1, body=body)
        self.receiving.on_peer_message(Visitor(b"p"), message, self._engine.tick())

    def offer(self, id: str, tokens: range) -> None:
        """A request, and its prompt is at the head of the sender's queue."""
        self._engine.add(id, tokens, receive_from=RECEIVE)
        self.receiving.accept(self._engine.scheduler.requests[id], RECEIVE, self._engine.tick())
        self._say(Offer(id=id, num_tokens=len(tokens), eta_s=0.0))

    def granted(self) -> set[str]:
        self.receiving.grant_waiting(self._engine.tick())
        return {body.id for body in self._listener.sent if isinstance(body, Grant)}


def test_who_was_preempted_comes_before_new_hand_offs():  # B57
    engine = Engine(num_blocks=6, prefix_caching=False)
    receiver = Receiver(engine, Always())
    engine.add("a", range(7), max_tokens=12)
    engine.add("b", range(50, 57), max_tokens=12)
    while not engine.scheduler.has_preempted:
        engine.step()
    preempted = engine.scheduler.requests["b"]
    assert preempted.status is RequestStatus.PREEMPTED

    receiver.offer("new", range(100, 103))
    assert engine.scheduler.usage().free >= 1, "there would be room for the new one"
    assert receiver.granted() == set()

    while engine.scheduler.has_preempted:
        engine.step()
    assert receiver.granted() == {"new"}


def test_a_prompt_that_is_computed_here_comes_before_later_hand_offs() -> None:
    engine = Engine(num_blocks=8, prefix_caching=False)
    receiver = Receiver(engine, GrantWhenRoom())
    engine.add("runs", range(3 * BLOCK), max_tokens=3 * BLOCK)
    engine.step()
    engine.add("local", range(100, 100 + 5 * BLOCK), max_tokens=2)
    receiver.offer("later", range(200, 203))
    assert engine.scheduler.usage().free >= 2, "there would be room for the later one"
    while "runs" in engine.scheduler.requests:
        assert receiver.granted() == set()
        engine.step()
    engine.step()
    assert engine.scheduler.requests["local"].status is RequestStatus.RUNNING
    assert receiver.granted() == {"later"}
