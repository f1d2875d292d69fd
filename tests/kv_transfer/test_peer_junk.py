"""What no peer of ours would say: its link fails, and the thread that moves everybody's blocks goes on."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from pdserve_kv_transfer.connector import MAX_SLOTS
from pdserve_kv_transfer.effects import Connect, LinkLost, NeedRegion, Transmit
from pdserve_kv_transfer.errors import SealSpent
from pdserve_kv_transfer.events import Connected, ConnectFailed, RegionFailed, WriteFailed, Written
from pdserve_kv_transfer.receiver_link import ReceiverLink
from pdserve_kv_transfer.seal import Seal
from pdserve_kv_transfer.sender_link import SenderLink
from pdserve_kv_transfer.tcp_wire import TcpRegion
from pdserve_kv_transfer.wire import agree
from pdserve_protocol.handoff import LinkHello, LinkRefused, LinkWelcome, PeerMessage, Region
from pdserve_protocol.node import KVLayout, mismatch
from support.handoff_world import identity
from support.movers import MoverPair, cache_of, mover_pair

BLOCK_BYTES = 8192
LAYOUT = KVLayout(block_size=16, num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32", block_bytes=BLOCK_BYTES)
TOKEN = {"id": bytes(16), "token": bytes(32)}


def still_moves(pair: MoverPair) -> None:
    region = pair.open_region("good")
    pair.sender.connect("good", pair.connector, region)
    pair.sent.expect(Connected)
    pair.sender.write("good", "r", [(0, 1, 0)])
    pair.sent.expect(Written)


@pytest.mark.parametrize("factor", [1 << 16, 1 << 40])
def test_blocks_that_fit_no_memory_are_refused(factor: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, block_size=16 * factor, block_bytes=BLOCK_BYTES * factor)
    peer, node = identity("p", layout=layout), identity("d", layout=LAYOUT)
    assert mismatch(peer, node) is None
    with mover_pair("loopback", BLOCK_BYTES) as pair:
        pair.receiver.open_region("p", "loopback", agree(peer, node))
        pair.received.expect(RegionFailed)
        still_moves(pair)


@pytest.mark.parametrize(
    "metadata",
    [
        TcpRegion(["a..b"], 1, **TOKEN),
        TcpRegion(["a\0b"], 1, **TOKEN),
        TcpRegion(["127.0.0.1"], -1, **TOKEN),
        TcpRegion(["127.0.0.1"], 1 << 40, **TOKEN),
        TcpRegion([], 1, **TOKEN),
        TcpRegion(["127.0.0.1"], 1, id=bytes(15), token=bytes(32)),
        TcpRegion(["127.0.0.1"], 1, id=bytes(16), token=bytes(100)),
    ],
    ids=["label", "nul", "port", "large-port", "nowhere", "id", "token"],
)
def test_metadata_of_the_tcp_connector(metadata: TcpRegion) -> None:
    with mover_pair("tcp", BLOCK_BYTES) as pair:
        region = Region(name="r", num_slots=4, slot_bytes=BLOCK_BYTES, metadata=msgspec.msgpack.encode(metadata))
        pair.sender.connect("d", "tcp", region)
        pair.sent.expect(ConnectFailed)
        still_moves(pair)


@pytest.mark.slow
@pytest.mark.parametrize("address", [-1, 1 << 63])
def test_an_address_of_the_nixl_connector(address: int) -> None:
    with mover_pair("nixl", BLOCK_BYTES) as pair:
        region = pair.open_region()
        agent, _ = msgspec.msgpack.decode(region.metadata)
        metadata = msgspec.msgpack.encode([agent, address])
        pair.sender.connect("d", "nixl", msgspec.structs.replace(region, metadata=metadata))
        pair.sent.expect(ConnectFailed)
        still_moves(pair)


@pytest.mark.parametrize("num_slots", [-1, 0, MAX_SLOTS + 1, 1 << 40])
def test_a_region_of_so_many_slots_is_not_connected_to(num_slots: int) -> None:
    link = SenderLink(identity("p1", layout=LAYOUT), "d1")
    link.open(0.0)
    region = Region(name="r", num_slots=num_slots, slot_bytes=BLOCK_BYTES, metadata=b"")
    body = LinkWelcome(identity=identity("d1", layout=LAYOUT), connector="loopback", exact=True, region=region)
    effects = link.on_peer_message(PeerMessage(from_boot="d1", to_boot="p1", from_sender=False, link=1, body=body), 0.0)
    assert isinstance(effects[0], LinkLost)
    assert not any(isinstance(effect, Connect) for effect in effects)


def test_a_process_that_says_it_is_another_while_its_region_is_made() -> None:
    # The region would be for blocks of one size, and what lands in it taken for blocks of the other.
    link = ReceiverLink(identity("d1", layout=LAYOUT), "p1")

    def hello(layout: KVLayout, number: int) -> PeerMessage:
        body = LinkHello(identity=identity("p1", layout=layout))
        return PeerMessage(from_boot="p1", to_boot="d1", from_sender=True, link=number, body=body)

    (effect,) = link.on_peer_message(hello(LAYOUT, 1), 0.0)
    assert isinstance(effect, NeedRegion)
    other = msgspec.structs.replace(LAYOUT, block_size=32, block_bytes=2 * BLOCK_BYTES)
    (answer,) = link.on_peer_message(hello(other, 2), 0.0)
    assert isinstance(answer, Transmit)
    assert isinstance(answer.message.body, LinkRefused)
    assert link.wire == effect.wire


def test_a_link_that_has_sealed_all_it_may_ends_and_the_next_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve_kv_transfer.seal._COUNT_BYTES", 1)
    seal, block = Seal("key", b"link"), cache_of(1, 64)[0]
    for _ in range(255):
        seal.seal(block, np.zeros(64, dtype=np.uint8), b"")
    with pytest.raises(SealSpent):
        seal.seal(block, np.zeros(64, dtype=np.uint8), b"")

    wire = agree(identity("p", layout=LAYOUT, kv_encrypt=True), identity("d", layout=LAYOUT, kv_encrypt=True))
    with mover_pair("loopback", BLOCK_BYTES, wire=wire, secret="key") as pair:
        pair.connect()
        pieces = [(position, 1, 0) for position in range(300)]
        pair.sender.write("d", "r1", pieces)
        written: set[int] = set()
        failed: set[int] = set()
        while len(written) + len(failed) < len(pieces):
            event = pair.sent.next()
            if isinstance(event, WriteFailed):
                failed |= event.positions
            else:
                assert isinstance(event, Written), event
                written |= event.digests.keys()
        assert (written, failed) == (set(range(255)), set(range(255, 300)))
        pair.connect(peer="p2", key="d2")
        pair.sender.write("d2", "r2", [(0, 1, 0)])
        pair.sent.expect(Written)
