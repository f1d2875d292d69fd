"""Two prefill and two decode nodes with tiny pools under any interleaving, over the oracle device.

Whatever the order, and whatever is lost, doubled, corrupted, cancelled, full or killed: no step reads a wrong entry, no
position has two tokens, each half has one end, nothing waits in a circle, and no block is left.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from pdserve_protocol.outputs import Failed, Finished
from support.node_world import NodeWorld

INDEX = st.integers(0, 10**6)
ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}
DECODERS = st.sampled_from(["d", "e"])
BOUND_S = 45.0
"""Beyond the 30 s that a finished prompt waits for its grant, and what follows."""


class Nodes(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(8, 16),
        slots=st.integers(1, 9),
        budget=st.integers(4, 16),
        policy=st.sampled_from(["offer", "offer", "dispatch", "finished"]),
    )
    def begin(self, blocks: int, slots: int, budget: int, policy: str) -> None:
        self.world = NodeWorld(
            ROLES,
            num_slots=slots,
            grant_policy=policy,  # type: ignore[arg-type]
            num_blocks=blocks,
            max_num_batched_tokens=budget,
            decode_on_after_s=0.3,
        )
        self.count = 0

    # The router.

    @rule(
        p=st.sampled_from(["p", "q"]),
        d=DECODERS,
        start=st.sampled_from([0, 0, 300, 600]),
        num=st.integers(1, 20),
        max_tokens=st.integers(2, 10),
    )
    def add(self, p: str, d: str, start: int, num: int, max_tokens: int) -> None:
        self.count += 1
        self.world.add(f"r{self.count}", p, d, range(start, start + num), max_tokens)

    @precondition(lambda self: self.count)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        self.world.abort(list(self.world.halves)[index % len(self.world.halves)])

    @precondition(lambda self: self.count)
    @rule(index=INDEX, d=DECODERS)
    def retarget(self, index: int, d: str) -> None:
        ids = [id for id in self.world.halves if self.is_open(id)]
        if ids:
            self.count += 1
            self.world.retarget(ids[index % len(ids)], f"r{self.count}", d)

    def is_open(self, id: str) -> bool:
        node = self.world.halves[id][0]
        return self.world.nodes[node.name] is node and (id, node.boot) not in self.world.ends

    @rule()
    def meet(self) -> None:
        self.world.meet()

    # What is under way.

    @rule(steps=st.integers(1, 40))
    def all_goes_well(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @precondition(lambda self: self.world.network)
    @rule(index=INDEX, fate=st.sampled_from(["deliver", "deliver", "deliver", "drop", "double"]))
    def message(self, index: int, fate: str) -> None:
        index %= len(self.world.network)
        if fate == "double":
            self.world.network.append(self.world.network[index])
        if fate == "drop":
            self.world.network.pop(index)
        else:
            self.world.deliver(index)

    @precondition(lambda self: self.world.flights)
    @rule(index=INDEX, fate=st.sampled_from(["land", "land", "corrupt", "fail"]))
    def write(self, index: int, fate: str) -> None:
        index %= len(self.world.flights)
        flight = self.world.flights[index]
        if fate != "fail":
            self.world.land_write(index, corrupt=fate == "corrupt")
        elif self.world.nodes[flight.node.name] is flight.node:
            self.world.fail_flight(flight)

    @precondition(lambda self: self.world.landings)
    @rule(index=INDEX)
    def land(self, index: int) -> None:
        self.world.land(index % len(self.world.landings))

    @rule(index=INDEX)
    def complete_step(self, index: int) -> None:
        busy = [node for node in self.world.nodes.values() if node.busy]
        if busy:
            busy[index % len(busy)].complete_step()

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.4, 1.0]), times=st.integers(1, 5))
    def time_passes(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.world.advance(seconds)

    @rule(d=DECODERS, is_full=st.booleans())
    def fill(self, d: str, is_full: bool) -> None:
        self.world.nodes[d].policy.is_full = is_full

    @rule(who=st.sampled_from([*ROLES, None, None, None, None, None, None]))
    def restart(self, who: str | None) -> None:
        if who is not None:
            self.world.restart(who)

    # The end.

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for node in world.nodes.values():
            node.policy.is_full = False
        world.run(BOUND_S)
        # A router ends the other half of what has failed.
        for id, halves in world.halves.items():
            ends = [world.ends.get((id, node.boot)) for node in halves]
            is_lost = any(world.nodes[node.name] is not node for node in halves)
            assert is_lost or any(end is not None for end in ends), f"{id}: both halves wait for ever"
            world.abort(id)
        world.run(1.0)
        world.check_empty()
        for id, halves in world.halves.items():
            world.check_tokens(id)
            for node in halves:
                end = world.ends.get((id, node.boot))
                assert end is not None or world.nodes[node.name] is not node, f"{id} has no end at {node.name}"
                assert not isinstance(end, Failed) or end.code in (
                    "handoff",
                    "stale_boot",
                    "bad_request",
                    "does_not_fit",
                )
                if isinstance(end, Finished):
                    assert len(world.tokens[id]) == world.max_tokens[id]


TestNodes = pytest.mark.slow(Nodes.TestCase)
TestNodes.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
