"""Lost and wrong messages, damaged blocks and failed writes, in simulated time."""

from __future__ import annotations

import pytest
from pdserve_kv_transfer.effects import (
    BreakLink,
    Cancelled,
    Completed,
    Ended,
    Failed,
    Send,
    Unneeded,
)
from pdserve_kv_transfer.sender import Sender
from pdserve_protocol.handoff import (
    Cancel,
    Done,
    Gone,
    Grant,
    NotNeeded,
    Offer,
    Region,
    Resend,
    Sent,
    State,
    Stopped,
    Stopping,
)
from pdserve_protocol.timing import NO_PROGRESS_S
from support.handoff_world import BLOCK_BYTES, FINAL, World, completed, drained, started


@pytest.mark.parametrize("kind", [Offer, Grant, Sent, Done])
def test_a_lost_message_is_said_again_by_state(kind: type) -> None:
    world = started(World())
    started(world, "warm")
    world.compute("warm")
    world.settle()
    world.expect("b")
    world.offer("b", 50)
    world.compute("b")
    lost = 0
    for _ in range(200):
        kept = [m for m in world.network if not isinstance(m.body, kind)]
        lost += len(world.network) - len(kept)
        world.network = kept
        if not world.step():
            world.advance(0.25)
        if world.d_ends["b"] and world.p_ends["b"]:
            break
    assert lost > 0
    completed(world, "b")


@pytest.mark.parametrize("kind", [Cancel, Stopped])
def test_a_lost_cancel_or_stopped_is_said_again(kind: type) -> None:
    world = started(World())
    world.settle()
    world.ready("a")
    world.cancel("a")
    for _ in range(40):
        world.network = [m for m in world.network if not isinstance(m.body, kind)]
        if not world.step():
            world.advance(0.25)
    assert world.p_ends["a"] == [Ended("a", Cancelled())]
    drained(world)
    assert world.lost == []


def test_a_lost_not_needed_is_said_again() -> None:
    world = started(World())
    world.settle()
    world.not_needed("a")
    world.network = [m for m in world.network if not isinstance(m.body, NotNeeded)]
    world.run(1.0)
    assert world.d_ends["a"] == [Ended("a", Unneeded())]


def test_an_old_state_is_dropped() -> None:
    world = started(World())
    world.settle()
    world.advance(0.5)
    old = [m for m in world.network if isinstance(m.body, State)]
    world.compute("a")
    world.run(2.0)
    completed(world)
    world.network += old
    world.run(1.0)
    drained(world)


def corrupt_landing(world: World, times: int = 1) -> int:
    """The first block to land is damaged so often; its position."""
    while not world.landings:
        world.step()
    landing = world.landings[0]
    position = min(landing.pieces)
    for number in range(times):
        while not [found for found in world.landings if position in found.pieces]:
            world.step()
        world.corrupt(landing.pieces[position].slot)
        for index, found in enumerate(list(world.landings)):
            if position in found.pieces:
                world.finish_landing(index)
                break
        assert world.d_ends["a"] == [] or number == times - 1
    return position


@pytest.mark.parametrize("times", [1, 2])
def test_a_corrupt_block_is_sent_again(times: int) -> None:
    world = started(World(), num_tokens=50)
    world.settle()
    world.compute("a")
    corrupt_landing(world, times)
    world.settle()
    end = completed(world)
    assert end.bad_positions == frozenset()
    assert (end.num_blocks, end.num_mismatches, end.num_resent) == (4, times, times)
    drained(world)
    assert world.lost == []


def test_a_block_that_never_comes_right_is_a_hole() -> None:
    world = started(World(), num_tokens=50)
    world.settle()
    world.compute("a")
    position = corrupt_landing(world, times=3)
    world.settle()
    end = completed(world)
    assert end.bad_positions == {position}
    assert (end.num_blocks, end.num_mismatches, end.num_resent) == (3, 3, 2)
    assert position not in world.cache["a"]
    drained(world)


def test_a_corrupt_block_of_an_early_chunk_is_sent_again_at_once() -> None:
    world = started(World(), num_tokens=64)
    world.settle()
    world.ready("a", [0, 16])
    corrupt_landing(world)
    world.settle()
    assert world.cache["a"].keys() == {0, 16}
    world.compute("a")
    world.settle()
    assert completed(world).bad_positions == frozenset()


@pytest.mark.parametrize("fate", ["lost", "doubled", "a State between"])
def test_a_resend_is_done_once_whatever_becomes_of_its_messages(fate: str) -> None:
    world = started(World(), num_tokens=50)
    world.settle()
    world.compute("a")
    position = corrupt_landing(world)
    resends = [m for m in world.network if isinstance(m.body, Resend)]
    assert resends
    if fate == "lost":
        world.network = [m for m in world.network if m not in resends]
    elif fate == "doubled":
        world.network += resends
    else:
        # The sender's State still tells of the write that failed: it is not landed again.
        world.network = [m for m in world.network if m not in resends]
        world.advance(0.5)
        for _ in range(len(world.network)):
            world.deliver()
        assert not [found for found in world.landings if position in found.pieces]
    world.run(2.0)
    end = completed(world)
    assert (end.bad_positions, end.num_resent, end.num_mismatches) == (frozenset(), 1, 1)
    drained(world)


@pytest.mark.parametrize("fate", ["stopped", "gone", "dead"])
def test_a_sender_that_ends_after_its_last_word_leaves_a_hole_and_no_failure(fate: str) -> None:
    world = started(World(num_slots=16), num_tokens=50)
    world.settle()
    world.compute("a")
    position = corrupt_landing(world)
    world.network = [m for m in world.network if not isinstance(m.body, Resend)]
    while world.landings:
        world.finish_landing()
    world.network = [m for m in world.network if not isinstance(m.body, Resend)]
    if fate == "stopped":
        world.abort("a")
    elif fate == "gone":
        link = world.d_of["a"]
        world.do(link, link._out(link._receiver.on_message(Gone(id="a"), world.now), world.now))
    else:
        world.start_p()
    world.run(4.0)
    (end,) = world.d_ends["a"]
    assert isinstance(end, Completed)
    assert end.bad_positions == {position}
    assert end.num_blocks == 3


def test_cancel_while_a_block_is_sent_again() -> None:
    world = started(World(), num_tokens=50)
    world.settle()
    world.compute("a")
    corrupt_landing(world)
    while not world.flights:
        world.deliver()
    world.cancel("a")
    while world.network:
        world.deliver()
    assert world.num_free_slots() != [world.num_slots], "the sender still writes"
    world.settle()
    assert world.d_ends["a"] == [Ended("a", Cancelled())]
    assert world.p_ends["a"] == [Ended("a", Cancelled())]
    drained(world)


@pytest.mark.parametrize("tries", [{0: 2}, {16: 1}, {64: 1}])
def test_a_wrong_resend_ends_the_hand_off(tries: dict[int, int]) -> None:
    sender = Sender(block_size=16)
    sender.set_region(Region(name="r", num_slots=8, slot_bytes=BLOCK_BYTES, metadata=b""))
    sender.offer("a", 32, 0.0, 0.0)
    sender.on_message(Grant(id="a", region="r", needed=[0, 16], slots={0: 3}), 0.0)
    sender.ready("a", [0], 0.0)
    sender.on_written("a", {0: b"d"}, 0.0)
    effects = sender.on_message(Resend(id="a", tries=tries), 0.0)
    assert [type(effect) for effect in effects] == [Send, Ended]


def test_after_done_a_resend_is_answered_gone() -> None:
    sender = Sender(block_size=16)
    assert sender.on_message(Resend(id="a", tries={0: 1}), 0.0) == [Send(Gone(id="a"))]


def test_a_failed_write_breaks_the_link_and_a_new_one_works() -> None:
    world = started(World())
    started(world, "waiting")
    world.settle()
    world.ready("a")
    world.fail_write()
    world.run(1.0)
    for id in ("a", "waiting"):
        (end,) = world.p_ends[id]
        assert isinstance(end, Ended)
        assert isinstance(end.outcome, Failed)
    started(world, "b")
    world.compute("b")
    world.settle()
    completed(world, "b")
    assert isinstance(world.d_ends["a"][0], Ended)


def test_a_failed_write_ends_nothing_before_its_siblings() -> None:
    # B03
    sender = Sender(block_size=16)
    sender.set_region(Region(name="r", num_slots=8, slot_bytes=BLOCK_BYTES, metadata=b""))
    sender.offer("a", 48, 0.0, 0.0)
    sender.on_message(Grant(id="a", region="r", needed=[0, 16, 32], slots={0: 3, 16: 4, 32: 5}), 0.0)
    for position in (0, 16, 32):
        sender.ready("a", [position], 0.0)
    assert [type(effect) for effect in sender.on_write_failed("a", [16], "broken", 0.0)] == [BreakLink]
    assert sender.link_lost("broken", 0.0) == []
    assert sender.on_written("a", {0: b""}, 0.0) == []
    ends = sender.on_write_failed("a", [32], "disconnected", 0.0)
    assert [end for end in ends if isinstance(end, Ended)] == [Ended("a", Failed("a write failed: broken"))]


def test_a_write_that_never_ends_breaks_the_link() -> None:
    world = started(World())
    world.settle()
    world.ready("a")
    flights, world.flights = world.flights, []
    world.run(9.0)
    world.flights = flights
    for _ in range(8):
        world.advance(0.25)
    assert world.lost
    assert world.p_ends["a"]
    # Nobody speaks over a link that is given up: the receiver notices the silence.
    world.run(4.0)
    assert world.d_ends["a"]


def test_after_a_last_sent_what_does_not_come_is_not_waited_for() -> None:
    world = started(World())
    world.settle()
    world.p_tokens["a"] = [7]
    link = world.d_of["a"]
    world.do(link, link._out(link._receiver.on_message(Sent(id="a", digests={}, final=FINAL), world.now), world.now))
    world.run_without_grants(NO_PROGRESS_S - 1)
    assert world.d_ends["a"] == []
    world.corrupted = True
    world.run(2.0)
    (end,) = world.d_ends["a"]
    assert isinstance(end, Completed)
    assert end.bad_positions == {0, 16, 32, 48}
    assert world.lost == []
    drained(world)


def test_a_write_that_fails_after_a_cancel_does_not_free_its_slots() -> None:
    world = started(World(), num_tokens=32)
    world.settle()
    world.ready("a")
    world.cancel("a")
    while world.network:
        world.deliver()
    world.fail_write()
    assert not [m for m in world.network if isinstance(m.body, Stopped)], "its bytes may still arrive"
    assert world.lost
    # The bytes do arrive, before the receiver has noticed: the world checks that the slots are still kept.
    world.settle()
    assert world.p_ends["a"] == [Ended("a", Cancelled())]


def test_a_doubled_sent_lands_once() -> None:
    world = started(World())
    world.settle()
    world.ready("a")
    world.land_write()
    (sent,) = [m for m in world.network if isinstance(m.body, Sent)]
    world.network += [sent, sent]
    while world.network:
        world.deliver()
    assert len(world.landings) == 1
    world.finish_landing()
    world.network.append(sent)
    world.deliver(world.network.index(sent))
    assert world.landings == []


def test_a_done_that_comes_too_early_is_a_fault_not_a_success() -> None:
    world = started(World())
    world.settle()
    link = world.p_links[0]
    world.do(link, link._sender.on_message(Done(id="a"), world.now)[1:])
    (end,) = world.p_ends["a"]
    assert isinstance(end, Ended)
    assert isinstance(end.outcome, Failed)


@pytest.mark.parametrize(
    ("needed", "slots"),
    [([8], {}), ([64], {}), ([-16], {}), ([0], {16: 0}), ([0], {0: 8}), ([0], {0: -1})],
)
def test_a_wrong_grant_ends_the_hand_off(needed: list[int], slots: dict[int, int]) -> None:
    sender = Sender(block_size=16)
    sender.set_region(Region(name="r", num_slots=8, slot_bytes=BLOCK_BYTES, metadata=b""))
    sender.offer("a", 64, 0.0, 0.0)
    effects = sender.on_message(Grant(id="a", region="r", needed=needed, slots=slots), 0.0)
    assert [type(effect) for effect in effects] == [Send, Ended]


def test_a_grant_for_another_region_is_ignored() -> None:
    sender = Sender(block_size=16)
    sender.set_region(Region(name="r", num_slots=8, slot_bytes=BLOCK_BYTES, metadata=b""))
    sender.offer("a", 64, 0.0, 0.0)
    sender.ready("a", [0], 0.0)
    assert sender.on_message(Grant(id="a", region="old", needed=[0], slots={0: 0}), 0.0) == []


def test_the_receiver_is_told_nothing_after_a_failed_write() -> None:
    sender = Sender(block_size=16)
    sender.set_region(Region(name="r", num_slots=8, slot_bytes=BLOCK_BYTES, metadata=b""))
    sender.offer("a", 16, 0.0, 0.0)
    sender.ready("a", [0], 0.0)
    sender.on_message(Grant(id="a", region="r", needed=[0], slots={0: 3}), 0.0)
    assert sender.on_message(Cancel(id="a"), 0.0) == [Send(Stopping(id="a"))]
    effects = sender.on_write_failed("a", [0], "broken", 0.0)
    assert [type(effect) for effect in effects] == [BreakLink, Ended]
    assert sender.describe() == {}
