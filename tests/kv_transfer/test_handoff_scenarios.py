"""One hand-off after the other through both ends of a link, in simulated time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs
from pdserve_kv_transfer.effects import (
    BreakLink,
    Cancelled,
    Completed,
    Ended,
    Failed,
    HandedOver,
    Refused,
    Send,
    Unneeded,
)
from pdserve_kv_transfer.sender import Sender
from pdserve_kv_transfer.sender_link import LinkState
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
from pdserve_protocol.timing import DEAD_AFTER_S, NO_PROGRESS_S, STOPPED_S
from support.handoff_world import BLOCK_BYTES, FINAL, World, positions_of

if TYPE_CHECKING:
    from pdserve_kv_transfer.receiver import GrantPolicy


def started(world: World, id: str = "a", num_tokens: int = 50, cached: tuple[int, ...] = ()) -> World:
    """Both halves are there and the offer is on its way."""
    world.num_tokens[id] = num_tokens
    world.expect(id)
    world.offer(id, num_tokens, cached=cached)
    return world


def completed(world: World, id: str = "a") -> Completed:
    (end,) = world.d_ends[id]
    assert isinstance(end, Completed), end
    assert world.p_ends[id] == [Ended(id, HandedOver())]
    return end


def drained(world: World) -> None:
    """Nothing is left of any hand-off on either side."""
    world.run(2.0)
    for p_link in world.p_links:
        assert p_link._sender.describe() == {}
    for d_link in world.d_links.values():
        assert d_link._receiver.describe() == {}
    assert set(world.num_free_slots()) <= {world.num_slots}


def test_everyday() -> None:
    world = started(World())
    world.settle()
    world.compute("a")
    world.settle()
    end = completed(world)
    assert end.final == FINAL
    assert (end.num_blocks, end.num_bytes, end.bad_positions) == (4, 4 * BLOCK_BYTES, frozenset())
    drained(world)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64, 65])
@pytest.mark.parametrize("cached", ["none", "first", "middle", "last", "all but one", "all"])
def test_only_the_missing_positions_are_sent(num_tokens: int, cached: str) -> None:
    # B04: blocks are matched by position, never by count. B52: nothing to send completes at once.
    positions = positions_of(num_tokens)
    caches = {
        "none": [],
        "first": positions[:1],
        "middle": positions[1:-1],
        "last": positions[-1:],
        "all but one": positions[:-1],
        "all": positions,
    }[cached]
    world = started(World(), num_tokens=num_tokens, cached=tuple(caches))
    world.settle()
    world.compute("a")
    world.settle()
    end = completed(world)
    missing = set(positions) - set(caches)
    assert end.num_blocks == len(missing)
    assert world.written_positions.get("a", set()) == missing


def test_chunks_are_pushed_while_the_next_is_computed() -> None:
    world = started(World(), num_tokens=64)
    world.settle()
    world.ready("a", [0, 16])
    world.settle()
    assert world.cache["a"].keys() == {0, 16}
    world.ready("a", [32, 48])
    world.finish("a")
    world.settle()
    completed(world)


def test_a_prompt_longer_than_the_region_goes_through_in_windows() -> None:
    # B15: all pieces once, whatever the length.
    world = started(World(num_slots=4), num_tokens=16 * 40)
    world.settle()
    world.compute("a")
    world.settle()
    assert completed(world).num_blocks == 40
    drained(world)


def test_two_long_prompts_share_the_region() -> None:
    world = World(num_slots=8)
    started(world, "a", 16 * 20)
    started(world, "b", 16 * 20)
    world.settle()
    # a is not computed yet and cannot keep b from moving.
    world.compute("b")
    world.settle()
    completed(world, "b")
    world.compute("a")
    world.settle()
    completed(world, "a")


def test_blocks_computed_before_the_grant_are_written_after_it() -> None:
    world = started(World())
    world.compute("a")
    assert world.flights == []
    world.settle()
    completed(world)


def test_an_offer_waits_for_the_other_half() -> None:
    world = World()
    world.offer("a", 20)
    world.run(1.0)
    world.expect("a")
    world.compute("a")
    world.settle()
    completed(world)


def test_an_offer_without_its_other_half_is_refused_after_two_seconds() -> None:
    world = World()
    world.offer("a", 20)
    world.run(3.0)
    assert world.p_ends["a"] == [Ended("a", Refused("no such request"))]
    # The half comes too late: it ends at once rather than never.
    world.expect("a")
    (end,) = world.d_ends["a"]
    assert isinstance(end, Ended)
    drained(world)


def test_the_engine_refuses() -> None:
    world = started(World())
    while not world.wanted:
        world.step()
    world.refuse("a")
    world.settle()
    assert world.p_ends["a"] == [Ended("a", Refused("does not fit"))]
    assert world.d_ends["a"] == [Ended("a", Refused("does not fit"))]
    drained(world)


def test_a_receiver_without_room_grants_later() -> None:
    world = started(World())
    while not world.wanted:
        world.step()
    wanted, world.wanted = world.wanted, {}
    world.run(20.0)
    assert world.p_ends["a"] == []
    world.wanted = wanted
    world.compute("a")
    world.settle()
    assert completed(world).timings.grant_s == pytest.approx(20.0, abs=0.5)


def test_no_grant_in_thirty_seconds_ends_both_sides() -> None:
    world = started(World())
    while not world.wanted:
        world.step()
    world.wanted.clear()
    # A prompt that is not computed is not kept waiting, however long it takes.
    world.run(100.0)
    assert world.p_ends["a"] == world.d_ends["a"] == []
    world.compute("a")
    world.run(31.0)
    assert isinstance(world.p_ends["a"][0].outcome, Failed)  # type: ignore[union-attr]
    assert isinstance(world.d_ends["a"][0].outcome, Failed)  # type: ignore[union-attr]
    drained(world)


def test_a_grant_after_the_hold_has_run_out_is_refused() -> None:
    # B01: the sender gives up just when the receiver has room at last; its blocks are somebody else's now.
    world = started(World())
    while not world.wanted:
        world.step()
    world.compute("a")
    wanted, world.wanted = world.wanted, {}
    world.run(29.5)
    while not world.p_ends["a"]:
        world.advance(0.25)
    (end,) = world.p_ends["a"]
    assert isinstance(end, Ended)
    assert isinstance(end.outcome, Failed)
    assert "no grant" in end.outcome.reason
    assert [m for m in world.network if isinstance(m.body, Stopped)], "the receiver does not know yet"
    world.network, world.wanted = [], wanted
    world.grant("a")
    world.run(2.0)
    assert isinstance(world.d_ends["a"][0], Ended)
    assert "a" not in world.written_positions
    assert "a" not in world.cache
    drained(world)


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


# When blocks are reserved.


def test_dispatch_reserves_as_soon_as_the_request_is_here() -> None:
    world = World(grant_policy="dispatch")
    world.num_tokens["a"] = 50
    world.expect("a")
    assert list(world.wanted) == ["a"], "before any offer"
    world.cached["a"] = set()
    world.grant("a")
    world.offer("a", 50)
    world.compute("a")
    world.settle()
    assert completed(world).timings.grant_s == 0.0
    drained(world)


def test_finished_reserves_when_the_prompt_is_computed() -> None:
    world = started(World(grant_policy="finished"))
    world.settle()
    world.ready("a")
    world.run(40.0)
    assert world.granted == set()
    assert world.d_ends["a"] == []
    world.finish("a")
    world.settle()
    completed(world)
    drained(world)


def test_finished_hears_it_from_a_state_too() -> None:
    world = started(World(grant_policy="finished"))
    world.settle()
    world.compute("a")
    world.network.clear()
    world.run(1.0)
    completed(world)


@pytest.mark.parametrize("policy", ["offer", "dispatch", "finished"])
def test_halves_of_different_lengths_are_refused(policy: GrantPolicy) -> None:
    world = World(grant_policy=policy)
    world.num_tokens["a"] = 50
    world.expect("a")
    world.offer("a", 49)
    world.compute("a")
    world.settle()
    for ends in (world.p_ends, world.d_ends):
        (end,) = ends["a"]
        assert isinstance(end, Ended)
        assert isinstance(end.outcome, Refused)
        assert "49 tokens offered, 50 expected" in end.outcome.reason
    drained(world)


# Holds.


def held_without_a_grant(num_tokens: int = 50) -> World:
    world = started(World(), num_tokens=num_tokens)
    while not world.wanted:
        world.step()
    world.compute("a")
    while world.network:
        world.deliver()
    return world


def test_a_hold_that_was_unpinned_is_computed_again_and_its_token_is_not_sampled_again() -> None:
    world = held_without_a_grant()
    world.unpin("a")
    world.settle()
    end = completed(world)
    assert end.final == FINAL
    assert end.bad_positions == frozenset()


def test_a_sender_goes_on_generating_while_the_receiver_is_full() -> None:
    world = held_without_a_grant()
    for _ in range(3):
        world.begin_decode_on("a")
        world.run_without_grants(20.0)
        world.end_decode_on("a")
    world.settle()
    assert completed(world).final.token_ids == [7, 8, 9, 10]
    drained(world)


def test_a_grant_that_comes_while_a_token_is_generated_waits_for_it() -> None:
    world = held_without_a_grant(num_tokens=50)
    world.begin_decode_on("a")
    world.settle()
    assert world.d_ends["a"] == []
    assert 48 not in world.written_positions["a"], "the block that the step writes to is not sent"
    world.end_decode_on("a")
    world.settle()
    assert completed(world).final.token_ids == [7, 8]


def test_retarget_ends_the_old_id_and_offers_the_blocks_anew() -> None:
    world = held_without_a_grant()
    world.num_tokens["a2"] = 50
    world.start_d()
    world.expect("a2")
    world.retarget("a", "a2")
    world.run(4.0)
    assert isinstance(world.p_ends["a"][0], Ended)
    completed(world, "a2")
    drained(world)


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


@pytest.mark.parametrize("cached", [(), (0, 16), (0, 16, 32)])
def test_a_prompt_may_take_as_long_as_it_takes(cached: tuple[int, ...]) -> None:
    # No time is announced, the steps are slow, and what the receiver has need not be sent.
    world = started(World(), num_tokens=64, cached=cached)
    for num_blocks in range(5):
        world.run(60.0)
        assert world.d_ends["a"] == world.p_ends["a"] == []
        world.ready("a", positions_of(64)[:num_blocks])
    world.finish("a")
    world.settle()
    assert completed(world).num_blocks == 4 - len(cached)
    assert world.lost == []
    drained(world)


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


def test_an_id_stands_for_one_hand_off() -> None:
    world = started(World())
    world.settle()
    world.compute("a")
    while not world.d_ends["a"]:
        world.step()
    # At once, when the sender has heard of the end, and when it has been long over.
    for seconds in (0.0, 1.0):
        completed_before = world.d_ends["a"]
        world.expect("a")
        (end,) = world.d_ends["a"]
        assert isinstance(end, Ended)
        assert isinstance(end.outcome, Failed)
        world.d_ends["a"] = completed_before
        world.run(seconds)
    completed(world)


def test_acknowledged_while_idle() -> None:
    # B40: the last Done is taken without any other traffic, and links keep quiet otherwise.
    world = started(World())
    world.settle()
    world.compute("a")
    world.settle()
    assert world.p_ends["a"]
    world.run(120.0)
    assert world.lost == []
    drained(world)


def test_a_process_that_was_asleep_does_not_take_its_peer_for_dead() -> None:
    world = started(World())
    world.settle()
    link = next(iter(world.d_links.values()))
    world.now += 8.0
    world.do(link, link.tick(world.now))
    assert world.lost == []


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
