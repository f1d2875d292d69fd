"""How hand-offs end early, in simulated time: cancelled, not needed, fenced off, either side gone and back."""

from __future__ import annotations

import pytest
from msgspec import structs
from pdserve_kv_transfer.effects import (
    Cancelled,
    Ended,
    Failed,
    Unneeded,
)
from pdserve_kv_transfer.sender_link import LinkState
from pdserve_protocol.handoff import (
    State,
    Stopping,
)
from pdserve_protocol.timing import DEAD_AFTER_S, NO_PROGRESS_S, STOPPED_S
from support.handoff_world import World, completed, drained, started


def test_the_output_ends_with_the_first_token() -> None:
    world = started(World())
    world.settle()
    world.ready("a", [0])
    world.not_needed("a")
    # A write is under way: nothing may be released and the receiver may not reuse the slot.
    assert world.p_ends["a"] == []
    world.settle()
    assert world.p_ends["a"] == [Ended("a", Unneeded())]
    assert world.d_ends["a"] == [Ended("a", Unneeded())]
    drained(world)


def test_not_needed_before_the_half_arrived_and_before_the_offer() -> None:
    world = World()
    world.offer("a", 20)
    world.not_needed("a")
    world.settle()
    world.expect("a")
    assert world.d_ends["a"] == [Ended("a", Unneeded())]
    drained(world)


def test_client_gone_after_prefill_frees_both_sides_at_once() -> None:
    # B30: 200 requests whose client leaves right after prefill: nothing stays pinned.
    world = World()
    for number in range(200):
        id = f"r{number}"
        started(world, id)
        world.settle()
        world.ready(id)
        world.cancel(id)
        world.settle()
        assert world.p_ends[id] == [Ended(id, Cancelled())]
        assert world.d_ends[id] == [Ended(id, Cancelled())]
    drained(world)
    assert world.lost == []


@pytest.mark.parametrize("phase", ["before the offer", "offered", "granted", "writing", "landing"])
def test_cancel_in_every_phase(phase: str) -> None:
    world = World()
    world.expect("a")
    if phase != "before the offer":
        world.offer("a", 50)
        while not world.wanted:
            world.step()
    if phase in ("granted", "writing", "landing"):
        world.settle()
    if phase in ("writing", "landing"):
        world.ready("a")
    if phase == "landing":
        while not world.landings:
            world.step()
    world.cancel("a")
    if phase == "landing":
        assert world.d_ends["a"] == [], "the pass still writes into the cache blocks"
    world.settle()
    assert world.d_ends["a"] == [Ended("a", Cancelled())]
    if phase == "before the offer":
        world.offer("a", 50)
        world.settle()
    (end,) = world.p_ends["a"]
    assert isinstance(end, Ended)
    assert isinstance(end.outcome, Cancelled | Failed)
    drained(world)
    assert world.lost == []


def test_a_cancel_blocks_an_id_that_arrives_after_it() -> None:
    world = started(World(), "first")
    world.settle()
    world.expect("a")
    world.cancel("a")
    world.settle()
    world.offer("a", 20)
    assert world.p_ends["a"] == [Ended("a", Cancelled())]
    assert world.network == []


def test_slots_of_a_cancelled_hand_off_stay_until_the_sender_has_stopped() -> None:
    world = started(World(num_slots=8), num_tokens=32)
    world.settle()
    world.ready("a")
    (flight,) = world.flights
    world.cancel("a")
    assert world.d_ends["a"] == [Ended("a", Cancelled())], "cache blocks are free at once"
    while world.network:
        world.deliver()
    assert world.num_free_slots() == [6], "the sender still writes"
    assert world.flights == [flight]
    world.settle()
    assert world.num_free_slots() == [8]


def test_slots_that_came_free_last_are_used_first() -> None:
    """Their memory is in caches; that of the others may not exist yet."""
    world = World(num_slots=8)
    used = []
    for id in "ab":
        started(world, id, 32)
        world.settle()
        world.ready(id)
        used.append([flight.slots for flight in world.flights])
        world.settle()
        world.finish(id)
        world.settle()
        assert world.num_free_slots() == [8]
    assert used[0] == used[1]


@pytest.mark.parametrize("answers", [True, False], ids=["it answers", "it does not answer"])
def test_a_sender_that_does_not_stop_is_fenced_off(answers: bool) -> None:
    # B32: bounded, also when the peer is alive but hangs. One that answers polls its writes, and is given their time.
    world = started(World(), num_tokens=32)
    started(world, "b", 32)
    world.settle()
    world.ready("a")
    world.cancel("a")
    flights, world.flights = world.flights, []
    # Its prompt goes over the next link: the half that waits here must live to see it.
    world.num_tokens["c"] = 32
    world.expect("c")
    limit_s = NO_PROGRESS_S if answers else STOPPED_S
    for elapsed in range(int(limit_s / 0.25) + 4):
        while world.network:
            if not answers:
                without_stopping(world)
            if world.network:
                world.deliver()
        assert world.lost == [] or elapsed * 0.25 >= limit_s - 0.5
        world.advance(0.25)
    assert world.lost
    assert [region.fenced for region in world.regions.values()] == [True]
    assert isinstance(world.d_ends["b"][0], Ended)
    # Late bytes hit the fenced region only, and the next link has another one.
    world.flights = flights
    world.settle()
    world.offer("c", 32)
    world.compute("c")
    world.settle()
    completed(world, "c")


def test_a_sender_that_has_lost_its_link_and_says_nothing_may_offer_later() -> None:
    world = started(World(), num_tokens=32)
    world.compute("a")
    world.settle()
    completed(world, "a")
    # A write failed, say. The next prompt for this receiver is still behind others, so no new link is begun.
    link = world.p_link()
    world.do(link, link.connect_failed("the wire is cut", world.now))
    world.num_tokens["b"] = 32
    world.expect("b")
    world.run(DEAD_AFTER_S + 1.0)
    assert not world.d_ends["b"]
    world.offer("b", 32)
    world.compute("b")
    world.settle()
    completed(world, "b")


def without_stopping(world: World) -> None:
    """Takes every word about a write that is under way from what the sender says."""
    kept = []
    for message in world.network:
        body = message.body
        if isinstance(body, State):
            body = structs.replace(body, entries=[e for e in body.entries if not isinstance(e, Stopping)])
        if not isinstance(body, Stopping):
            kept.append(structs.replace(message, body=body))
    world.network = kept


def test_cancel_while_the_sender_dies() -> None:
    # B32: abort on decode while the prefill node is killed, until the pool would be used up.
    world = World()
    for number in range(20):
        id = f"r{number}"
        started(world, id)
        world.settle()
        world.ready(id)
        world.start_p()
        world.cancel(id)
        world.run(4.0)
        assert world.d_ends[id] == [Ended(id, Cancelled())]
    started(world, "z")
    world.compute("z")
    world.settle()
    completed(world, "z")


def test_the_sender_dies_in_the_middle() -> None:
    world = started(World())
    world.settle()
    world.ready("a", [0])
    world.settle()
    world.start_p()
    world.run(3.5)
    (end,) = world.d_ends["a"]
    assert isinstance(end, Ended)
    assert isinstance(end.outcome, Failed)


def test_a_restarted_sender_is_served_at_once() -> None:
    # B113: survivors notice by the boot id.
    world = started(World())
    world.settle()
    world.start_p()
    started(world, "b")
    world.compute("b")
    world.settle()
    completed(world, "b")


def test_the_receiver_dies_and_comes_back() -> None:
    # B113
    world = started(World())
    world.settle()
    world.start_d()
    world.run(1.0)
    (end,) = world.p_ends["a"]
    assert isinstance(end, Ended)
    assert isinstance(end.outcome, Failed)
    assert "restarted" in end.outcome.reason
    started(world, "b")
    world.compute("b")
    world.settle()
    completed(world, "b")


def test_a_receiver_that_is_silent_is_lost_in_three_seconds() -> None:
    world = started(World())
    world.settle()
    world.ready("a")
    world.settle()
    for _ in range(14):
        world.advance(0.25)
        world.network.clear()
    assert world.p_links[0].state is LinkState.LOST
    assert isinstance(world.p_ends["a"][0], Ended)


def test_aborted_on_the_senders_side() -> None:
    world = started(World())
    world.settle()
    world.ready("a")
    world.abort("a")
    assert world.p_ends["a"] == [], "the write under way still reads the blocks"
    world.settle()
    assert world.p_ends["a"] == [Ended("a", Failed("aborted"))]
    assert world.d_ends["a"] == [Ended("a", Failed("the sender stopped: aborted"))]
    drained(world)


def test_a_process_that_was_asleep_does_not_take_its_peer_for_dead() -> None:
    world = started(World())
    world.settle()
    link = next(iter(world.d_links.values()))
    world.now += 8.0
    world.do(link, link.tick(world.now))
    assert world.lost == []
