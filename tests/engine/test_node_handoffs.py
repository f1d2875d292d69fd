"""Hand-offs between whole nodes: holds, their shares, decoding on, grants in any order, retargets, dead processes."""

from __future__ import annotations

import pytest
from pdserve_protocol.outputs import Aborted, Failed, Finished, HandedOver
from support.engines import BLOCK
from support.node_world import NodeWorld

P_D = {"p": "prefill", "d": "decode"}
P_DD = {"p": "prefill", "d": "decode", "e": "decode"}


def finished(world: NodeWorld, id: str, receiver: str = "d") -> None:
    assert world.end(id, "p") == HandedOver()
    assert world.end(id, receiver) == Finished(reason="length")
    assert len(world.tokens[id]) == world.max_tokens[id]
    world.check_tokens(id)


@pytest.mark.parametrize("policy", ["offer", "dispatch", "finished"])
def test_everyday(policy: str) -> None:
    world = NodeWorld(P_D, grant_policy=policy)  # type: ignore[arg-type]
    for number in range(3):
        world.add(f"r{number}", "p", "d", range(10 * number, 10 * number + 9), 6)
    world.run(1.0)
    for number in range(3):
        finished(world, f"r{number}")
        assert world.proofs[f"r{number}"].recomputed_tokens == 0
    world.check_empty()
    reserved = world.nodes["d"].proc._receiving.reserved
    assert reserved.now == 0
    assert reserved.most > 0


def test_one_receiver_that_is_full_does_not_stop_the_others() -> None:
    world = NodeWorld(P_DD, num_blocks=16)
    world.nodes["d"].policy.is_full = True
    for number in range(8):
        world.add(f"d{number}", "p", "d", range(20 * number, 20 * number + 9), 4)
    world.run(0.5)
    usage = world.nodes["p"].engine.scheduler.usage()
    assert 0 < usage.held <= 16 // 2 + 3, "the share of one receiver, and the prompt that fills it"
    for number in range(4):
        world.add(f"e{number}", "p", "e", range(500 + 20 * number, 500 + 20 * number + 9), 4)
    world.run(0.5)
    for number in range(4):
        finished(world, f"e{number}", "e")
    world.nodes["d"].policy.is_full = False
    world.run(3.0)
    for number in range(8):
        finished(world, f"d{number}")
    world.check_empty()


def test_a_granted_prompt_gets_the_room_of_the_oldest_hold() -> None:
    world = NodeWorld(P_DD, num_blocks=8)
    world.nodes["d"].policy.is_full = True
    for number in range(2):
        world.add(f"d{number}", "p", "d", range(20 * number, 20 * number + 9), 4)
    world.run(0.2)
    assert world.nodes["p"].engine.scheduler.usage().held > 0
    world.add("e", "p", "e", range(500, 500 + 6 * BLOCK), 3)
    world.run(0.2)
    finished(world, "e", "e")
    before = world.nodes["p"].engine.core.counters.recomputed_tokens
    world.nodes["d"].policy.is_full = False
    world.run(2.0)
    for number in range(2):
        finished(world, f"d{number}")
    assert world.nodes["p"].engine.core.counters.recomputed_tokens > before
    world.check_empty()


def test_a_prefill_node_decodes_on_while_its_receiver_is_full() -> None:
    world = NodeWorld(P_D, decode_on_after_s=0.3)
    world.run(0.1)
    world.nodes["d"].policy.is_full = True
    world.add("a", "p", "d", range(9), 40)
    world.run(0.2)
    assert len(world.tokens["a"]) == 1
    world.run_some(10)
    assert 3 <= len(world.tokens["a"]) < 40
    world.nodes["d"].policy.is_full = False
    world.run(1.0)
    finished(world, "a")
    world.check_empty()


def test_a_prefill_node_may_finish_an_output_that_nobody_takes_over() -> None:
    world = NodeWorld(P_D, decode_on_after_s=0.3)
    world.nodes["d"].policy.is_full = True
    world.add("a", "p", "d", range(9), 6)
    world.run(1.0)
    assert world.end("a", "p") == Finished(reason="length")
    assert world.end("a", "d") == Aborted()
    world.check_tokens("a")
    assert len(world.tokens["a"]) == 6
    world.check_empty()


def test_prompts_come_before_decoding_on() -> None:
    world = NodeWorld(P_DD, decode_on_after_s=0.3, max_num_batched_tokens=8)
    world.nodes["d"].policy.is_full = True
    world.add("a", "p", "d", range(9), 40)
    world.run(0.2)
    world.advance(0.4)
    world.add("b", "p", "e", range(100, 140), 2)
    p = world.nodes["p"]
    while ("b", p.boot) not in world.ends and len(world.tokens["b"]) == 0:
        steps = [step for step in p.engine.scheduler._steps]
        assert not any({r.request_id for r in step.requests} >= {"a", "b"} for step in steps)
        assert world.step()
    world.abort("a")
    world.run(1.0)
    world.check_empty()


def test_retarget_sends_what_is_held_to_another_node() -> None:
    world = NodeWorld(P_DD)
    world.nodes["d"].policy.is_full = True
    world.add("a", "p", "d", range(9), 6)
    world.run(0.2)
    steps = world.nodes["p"].engine.executor.num_steps
    world.retarget("a", "a2", "e")
    world.run(1.0)
    assert world.end("a", "p") == Aborted()
    assert isinstance(world.end("a", "d"), Failed)
    finished(world, "a2", "e")
    assert world.nodes["p"].engine.executor.num_steps == steps, "nothing is computed again"
    world.check_empty()


def test_a_retarget_of_what_is_not_held_fails() -> None:
    world = NodeWorld(P_DD)
    world.add("a", "p", "d", range(9), 6)
    world.run(1.0)
    finished(world, "a")
    world.retarget("a", "a2", "e")
    assert isinstance(world.end("a2", "p"), Failed)
    world.abort("a2")
    world.run(1.0)
    world.check_empty()


def test_a_corrupt_block_is_sent_again() -> None:
    world = NodeWorld(P_D)
    world.add("a", "p", "d", range(9), 6)
    while not world.flights:
        assert world.step()
    world.land_write(corrupt=True)
    world.run(1.0)
    finished(world, "a")
    proof = world.proofs["a"]
    assert (proof.recomputed_tokens, proof.mismatches) == (0, proof.resent_blocks)
    assert proof.mismatches > 0


def test_a_block_that_never_comes_right_is_computed_from_there_on() -> None:
    world = NodeWorld(P_D, num_slots=32)
    world.add("a", "p", "d", range(5 * BLOCK), 6)
    for _ in range(300):
        if world.flights:
            flight = world.flights[0]
            world.land_write(corrupt=any(position == 2 * BLOCK for position, _, _ in flight.pieces))
        elif not world.step():
            break
    world.run(1.0)
    finished(world, "a")
    proof = world.proofs["a"]
    assert 0 < proof.recomputed_tokens <= 5 * BLOCK
    world.check_empty()


@pytest.mark.parametrize("who", ["p", "d"])
def test_a_node_comes_back_at_the_same_address(who: str) -> None:
    # B113
    world = NodeWorld(P_D)
    world.add("a", "p", "d", range(9), 50)
    while not world.flights:
        assert world.step()
    world.restart(who)
    world.meet()
    world.run(0.3)
    survivor = world.nodes["d" if who == "p" else "p"]
    assert world.end("a", survivor.name) is not None, "noticed at once, not by silence"
    world.add("b", "p", "d", range(9), 5)
    world.run(1.0)
    finished(world, "b")


def test_links_are_up_before_the_first_request() -> None:
    world = NodeWorld(P_DD)
    world.meet()
    world.run(0.2)
    assert list(world.nodes["p"].proc._sending.peers().values()) == ["sending, up"] * 2
    load = world.nodes["p"].proc._load()
    assert load.links == {world.nodes["d"].boot: "up", world.nodes["e"].boot: "up"}


def test_who_cannot_be_paired_is_refused_by_name_when_they_meet() -> None:
    world = NodeWorld(P_D, model_of={"d": "other"})
    world.meet()
    world.run(0.2)
    (state,) = world.nodes["p"].proc._load().links.values()
    assert state.startswith("refused: model_id")


def test_a_hold_that_is_computed_again_while_its_receiver_needs_nothing() -> None:
    # The receiver has the whole prompt cached: the hand-off is over before the prefill node has its KV again.
    world = NodeWorld(P_DD, num_blocks=8, decode_on_after_s=1e9)
    world.add("before", "p", "d", range(12), 4)
    world.run(1.0)
    world.nodes["d"].policy.is_full = True
    world.add("hold", "p", "d", range(12), 4)
    world.run(0.5)
    world.add("big", "p", "e", range(500, 522), 4)
    world.run(1.0)
    assert world.nodes["p"].engine.scheduler.block_ids("hold") == []
    world.nodes["d"].policy.is_full = False
    world.run(3.0)
    finished(world, "hold")
    world.check_empty()
