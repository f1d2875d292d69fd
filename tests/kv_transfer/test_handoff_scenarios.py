"""Hand-offs through both ends of a link, in simulated time: what is sent, when blocks are granted, what is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pdserve_kv_transfer.effects import (
    Ended,
    Failed,
    Refused,
)
from pdserve_protocol.handoff import (
    Stopped,
)
from support.handoff_world import BLOCK_BYTES, FINAL, World, completed, drained, positions_of, started

if TYPE_CHECKING:
    from pdserve_kv_transfer.receiver import GrantPolicy


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
