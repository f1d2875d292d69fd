"""How two nodes meet: who is let in, who is refused by name, and what happens when nobody answers."""

from __future__ import annotations

import math

import msgspec
import pytest
from pdserve_kv_transfer.effects import Connect, Ended, Failed, LinkLost, NeedRegion, Transmit
from pdserve_kv_transfer.link import stale_boot
from pdserve_kv_transfer.receiver_link import ReceiverLink, ReceiverLinkState
from pdserve_kv_transfer.sender_link import LinkState, SenderLink
from pdserve_kv_transfer.wire import agree
from pdserve_protocol.handoff import LinkHello, LinkRefused, LinkWelcome, PeerMessage, Region, StaleBoot
from pdserve_protocol.timing import LINK_UP_S, STOPPED_S
from support.handoff_world import BLOCK_BYTES, World, identity


def reason_of(world: World) -> str:
    (end,) = world.p_ends["a"]
    assert isinstance(end, Ended)
    assert isinstance(end.outcome, Failed)
    return end.outcome.reason


@pytest.mark.parametrize(
    ("field", "value"), [("model_id", "other"), ("tokenizer_id", "other"), ("digest", "md5"), ("version", 99)]
)
def test_a_mismatch_is_refused_by_name(field: str, value: object) -> None:
    world = World()
    world.start_d(**{field: value})
    world.offer("a", 20)
    world.settle()
    assert field in reason_of(world)
    assert world.regions == {}, "no memory is opened for a stranger"


def test_layouts_must_agree() -> None:
    world = World()
    layout = msgspec.structs.replace(world.p.layout, num_layers=3)
    world.start_d(layout=layout)
    world.offer("a", 20)
    world.settle()
    assert "num_layers" in reason_of(world)


def test_unlike_numerics_serve_but_are_not_exact() -> None:
    world = World()
    world.start_d(numerics="other")
    world.expect("a")
    world.offer("a", 20)
    world.compute("a")
    world.settle()
    assert not next(iter(world.d_links.values())).exact
    assert world.d_ends["a"]


def test_nobody_answers() -> None:
    world = World()
    world.offer("a", 20)
    for _ in range(math.ceil(LINK_UP_S / 0.25) + 2):
        world.network.clear()
        world.advance(0.25)
    assert "welcomed" in reason_of(world)


def test_a_lost_hello_or_welcome_is_repeated() -> None:
    world = World()
    world.expect("a")
    world.offer("a", 20)
    world.network.clear()
    world.advance(0.5)
    world.deliver()
    world.open_region()
    world.network.clear()
    world.run(1.0)
    assert world.p_links[0].state is LinkState.UP
    world.compute("a")
    world.settle()
    assert world.p_ends["a"]


def test_a_receiver_that_slept_reads_before_it_judges() -> None:
    # The sender has stopped in time, and its word lies unread: what another request has been granted is not lost.
    world = World()
    for id in "ab":
        world.num_tokens[id] = 32
        world.expect(id)
        world.offer(id, 32)
    world.settle()
    world.ready("a")
    world.cancel("a")
    (link,) = world.d_links.values()
    for seconds in (STOPPED_S + 0.2, 0.1):
        world.now += seconds
        effects = link.tick(world.now)
        if seconds > STOPPED_S:
            assert effects == []
            while world.flights:
                world.land_write()
            world.settle()
    assert not any(isinstance(effect, LinkLost) for effect in effects)
    assert link.state is ReceiverLinkState.UP


def test_a_doubled_hello_does_not_break_a_live_link() -> None:
    world = World()
    world.expect("a")
    world.offer("a", 20)
    hello = world.network[0]
    world.settle()
    world.network += [hello, hello]
    world.settle()
    world.compute("a")
    world.settle()
    assert world.lost == []
    assert len(world.regions) == 1


def test_a_late_hello_of_an_older_link_is_ignored() -> None:
    link = ReceiverLink(identity("d1"), "p1")
    hello = LinkHello(identity=identity("p1"))
    envelope = {"from_boot": "p1", "to_boot": "d1", "from_sender": True, "body": hello}
    wire = agree(identity("p1"), identity("d1"))
    assert link.on_peer_message(PeerMessage(**envelope, link=2), 0.0) == [NeedRegion("loopback", wire)]
    assert link.on_peer_message(PeerMessage(**envelope, link=1), 0.0) == []


def test_no_region_is_a_refusal() -> None:
    link = ReceiverLink(identity("d1"), "p1")
    hello = PeerMessage(from_boot="p1", to_boot="d1", from_sender=True, link=1, body=LinkHello(identity=identity("p1")))
    link.on_peer_message(hello, 0.0)
    (effect,) = link.region_failed("out of memory", 0.0)
    assert isinstance(effect, Transmit)
    assert isinstance(effect.message.body, LinkRefused)
    # The next link may have more luck.
    (effect,) = link.on_peer_message(msgspec.structs.replace(hello, link=2), 1.0)
    assert isinstance(effect, NeedRegion)


@pytest.mark.parametrize("change", [{"slot_bytes": BLOCK_BYTES + 1}, {}])
def test_a_welcome_is_checked(change: dict[str, int]) -> None:
    link = SenderLink(identity("p1"), "d1")
    link.open(0.0)
    region = Region(name="r", num_slots=4, slot_bytes=change.get("slot_bytes", BLOCK_BYTES), metadata=b"")
    body = LinkWelcome(identity=identity("d1"), connector="loopback", exact=True, region=region)
    (effect, *_) = link.on_peer_message(
        PeerMessage(from_boot="d1", to_boot="p1", from_sender=False, link=1, body=body), 0.0
    )
    assert isinstance(effect, LinkLost if change else Connect)


def test_a_message_for_a_dead_process_is_answered_once() -> None:
    message = PeerMessage(from_boot="p1", to_boot="d1", from_sender=True, link=3, body=LinkRefused(reason=""))
    answer = stale_boot("d2", message)
    assert answer is not None
    assert answer.body == StaleBoot(boot_id="d2")
    assert (answer.from_boot, answer.to_boot, answer.from_sender, answer.link) == ("d1", "p1", False, 3)
    assert stale_boot("p2", answer) is None
    assert stale_boot("d1", message) is None


def test_unlike_layouts_are_no_mismatch_and_the_wire_has_the_sender_s_blocks() -> None:
    ours, theirs = identity("d1"), identity("p1")
    size = theirs.layout.block_size * 2
    layout = msgspec.structs.replace(
        theirs.layout, block_size=size, block_bytes=theirs.layout.block_bytes * 2, order="L2SGD"
    )
    link = ReceiverLink(ours, "p1")
    hello = LinkHello(identity=msgspec.structs.replace(theirs, layout=layout))
    envelope = PeerMessage(from_boot="p1", to_boot="d1", from_sender=True, link=1, body=hello)
    (effect,) = link.on_peer_message(envelope, 0.0)
    assert isinstance(effect, NeedRegion)
    assert effect.wire.slot_bytes == layout.block_bytes
    assert (link.exact, link.origin) == (True, "")


def test_a_lossy_wire_is_not_exact_and_has_an_origin() -> None:
    ours, theirs = identity("d1", kv_wire_dtype="int8"), identity("p1", kv_wire_dtype="int8")
    link = ReceiverLink(ours, "p1")
    hello = PeerMessage(from_boot="p1", to_boot="d1", from_sender=True, link=1, body=LinkHello(identity=theirs))
    link.on_peer_message(hello, 0.0)
    assert (link.exact, link.origin) == (False, "n as int8")
