"""The links of a node that sends, over a real scheduler, with a door and a mover that only listen."""

from __future__ import annotations

import msgspec
import pytest
from pdserve_engine.sending import Sending
from pdserve_kv_transfer.events import Connected, WriteFailed
from pdserve_kv_transfer.sender_link import LinkState
from pdserve_protocol.door import Address
from pdserve_protocol.handoff import Grant, LinkHello, LinkRefused, LinkWelcome, PeerMessage, Region
from pdserve_protocol.node import KVLayout, NodeIdentity
from support.engines import BLOCK, SEND, Engine

P = NodeIdentity(
    boot_id="p",
    role="prefill",
    model_id="m",
    tokenizer_id="t",
    numerics="n",
    layout=KVLayout(block_size=BLOCK, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_bytes=32),
    digest="x",
    connectors=["c"],
)


class Listener:
    """Takes any order and keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[PeerMessage] = []
        self.pieces: list[tuple[int, int, int]] = []
        self.disconnected: list[object] = []

    def send(self, route: object, message: PeerMessage) -> None:
        self.sent.append(message)

    def disconnect(self, peer: object) -> None:
        self.disconnected.append(peer)

    def connect(self, peer: str, connector: str, region: Region, wire: object) -> None:
        pass

    def write(self, peer: str, id: str, pieces: list[tuple[int, int, int]]) -> None:
        self.pieces += pieces


class NoPromise:
    def eta_s(self, num_tokens: int) -> float:
        return 0.0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        pass


@pytest.mark.parametrize("boots", [["d"] * 6, [f"d{number}" for number in range(6)]], ids=["one", "many"])
def test_lost_links_are_forgotten_and_their_numbers_never_come_again(boots: list[str]) -> None:
    engine, listener = Engine(num_blocks=64), Listener()
    outputs: list[object] = []
    sending = Sending(engine.core, listener, listener, P, NoPromise(), outputs.append)  # type: ignore[arg-type]
    sizes: set[int] = set()
    for number, boot in enumerate(boots):
        send_to = msgspec.structs.replace(SEND, boot_id=boot)
        for id in (f"r{number}", f"s{number}"):
            engine.add(id, range(3), send_to=send_to)
            sending.accept(engine.scheduler.requests[id], send_to)
        engine.begin()
        sending.on_scheduled(engine.tick())
        (link,) = sending._links.values()
        hello = listener.sent[-1]
        assert isinstance(hello.body, LinkHello)
        engine.complete()
        refused = PeerMessage(
            from_boot=boot, to_boot="p", from_sender=False, link=hello.link, body=LinkRefused(reason="")
        )
        sending.on_peer_message(refused, engine.tick())
        assert link.machine.state is LinkState.LOST
        sending.tick(engine.tick())
        assert sending.num_open == 0
        assert not sending.is_active()
        sizes.add(sum(len(held) for held in vars(sending).values() if isinstance(held, dict)))
    links = [message.link for message in listener.sent if isinstance(message.body, LinkHello)]
    assert links == sorted(set(links)), "a number came again"
    assert len(links) == len(boots), "two hand-offs to one receiver go over one link"
    assert sizes == {0}, "something is kept of links that are over"


def test_a_lost_link_leaves_its_address_to_the_process_that_came_after() -> None:
    # B113: requests name the new process before the old one is known to be dead.
    engine, listener = Engine(num_blocks=64), Listener()
    sending = Sending(engine.core, listener, listener, P, NoPromise(), [].append)  # type: ignore[arg-type]
    address = Address(SEND.host, SEND.port)
    for boot in ("old", "new"):
        send_to = msgspec.structs.replace(SEND, boot_id=boot)
        engine.add(boot, range(3), send_to=send_to)
        sending.accept(engine.scheduler.requests[boot], send_to)
        engine.begin()
        sending.on_scheduled(engine.tick())
        engine.complete()
    hellos = [message for message in listener.sent if isinstance(message.body, LinkHello)]
    for hello, disconnected in zip(hellos, (False, True), strict=True):
        refused = PeerMessage(
            from_boot=hello.to_boot, to_boot="p", from_sender=False, link=hello.link, body=LinkRefused(reason="")
        )
        sending.on_peer_message(refused, engine.tick())
        assert (address in listener.disconnected) is disconnected


def test_blocks_of_a_failed_write_s_siblings_are_nobody_else_s_until_they_have_ended() -> None:
    # B03: the first chunk's write fails, that of the second is under way, and other prompts want the room.
    engine, listener = Engine(num_blocks=8, max_num_batched_tokens=2 * BLOCK, prefix_caching=False), Listener()
    outputs: list[object] = []
    sending = Sending(engine.core, listener, listener, P, NoPromise(), outputs.append)  # type: ignore[arg-type]

    def say(body: LinkWelcome | Grant) -> None:
        message = PeerMessage(from_boot="d", to_boot="p", from_sender=False, link=1, body=body)
        sending.on_peer_message(message, engine.tick())

    engine.add("a", range(4 * BLOCK), send_to=SEND)
    sending.accept(engine.scheduler.requests["a"], SEND)
    engine.begin()
    sending.on_scheduled(engine.tick())
    region = Region(name="r", num_slots=8, slot_bytes=32, metadata=b"")
    say(LinkWelcome(identity=msgspec.structs.replace(P, boot_id="d"), connector="c", exact=True, region=region))
    (key,) = sending._links
    sending.on_mover_event(Connected(key), engine.tick())
    positions = [BLOCK * number for number in range(4)]
    say(Grant(id="a", region="r", needed=positions, slots={position: n for n, position in enumerate(positions)}))
    sending.on_results(engine.complete(), engine.tick())
    engine.begin()
    sending.on_results(engine.complete(), engine.tick())
    assert [position for position, _, _ in listener.pieces] == positions
    under_way = {block for _, block, _ in listener.pieces[2:]}

    sending.on_mover_event(WriteFailed(key, "a", frozenset(positions[:2]), "broken"), engine.tick())
    assert outputs == []
    sending.abort("a", "aborted", engine.tick())
    engine.abort("a")
    assert outputs == []
    engine.add("b", range(100, 100 + 5 * BLOCK), max_tokens=1)
    engine.add("c", range(200, 200 + BLOCK), max_tokens=1)
    for _ in range(4):
        engine.step()
        taken = {block for id in ("b", "c") for block in engine.scheduler.block_ids(id)}
        assert not taken & under_way, "a block that is still read has been given away"
    sending.on_mover_event(WriteFailed(key, "a", frozenset(positions[2:]), "disconnected"), engine.tick())
    assert sending.num_open == 0
    engine.run()
    engine.check_blocks()
    usage = engine.scheduler.usage()
    assert usage.free + usage.cached == usage.total
