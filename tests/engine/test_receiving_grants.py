"""When blocks are granted to a hand-off, over a real scheduler and links, with a door and a mover that only listen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
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


def test_who_was_preempted_comes_before_new_hand_offs():  # B57
    engine = Engine(num_blocks=6, prefix_caching=False)
    listener = Listener()
    receiving = Receiving(
        engine.core,
        listener,
        listener,
        D,
        Always(),
        lambda output: None,
        engine.note,  # type: ignore[arg-type]
    )

    def say(body: LinkHello | Offer) -> None:
        message = PeerMessage(from_boot="p", to_boot="d", from_sender=True, link=1, body=body)
        receiving.on_peer_message(Visitor(b"p"), message, engine.tick())

    def granted() -> set[str]:
        return {body.id for body in listener.sent if isinstance(body, Grant)}

    say(LinkHello(identity=P))
    region = Region(name="r", num_slots=8, slot_bytes=32, metadata=b"")
    receiving.on_mover_event(RegionOpened("from/p", region), engine.tick())

    engine.add("a", range(7), max_tokens=12)
    engine.add("b", range(50, 57), max_tokens=12)
    while not engine.scheduler.has_preempted:
        engine.step()
    preempted = engine.scheduler.requests["b"]
    assert preempted.status is RequestStatus.PREEMPTED

    engine.add("new", range(100, 103), receive_from=RECEIVE)
    receiving.accept(engine.scheduler.requests["new"], RECEIVE, engine.tick())
    say(Offer(id="new", num_tokens=3, eta_s=0.0))
    assert engine.scheduler.usage().free >= 1, "there would be room for the new one"
    receiving.grant_waiting(engine.tick())
    assert granted() == set()

    while engine.scheduler.has_preempted:
        engine.step()
    receiving.grant_waiting(engine.tick())
    assert granted() == {"new"}
