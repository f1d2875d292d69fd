"""Any interleaving of deliveries, losses, doubles, timeouts, cancels, faults and restarts, and what holds in each.

The world checks at every effect: one end per id and side, no end with a write or landing pass under way, nothing
completed that was not verified, no hole where nothing was wrong, no token generated after the receiver has taken over,
no write into a slot that is somebody else's or from a block that is, nothing sent that the receiver has. Here, after
everything has been repaired, that everything has ended and nothing is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from pdserve_kv_transfer.effects import Completed, Ended, HandedOver
from support.handoff_world import World, positions_of

if TYPE_CHECKING:
    from pdserve_kv_transfer.receiver import GrantPolicy

INDEX = st.integers(0, 50)
BOUND_S = 75.0
"""Beyond the longest chain of deadlines: 30 s to grant, then 60 s of memory are not waited for by anybody's end."""


class HandOffs(RuleBasedStateMachine):
    """Ids are drawn from those that exist; indices are taken modulo what is there."""

    @initialize(num_slots=st.integers(1, 9), policy=st.sampled_from(["offer", "offer", "dispatch", "finished"]))
    def begin(self, num_slots: int, policy: GrantPolicy) -> None:
        self.world = World(num_slots=num_slots, grant_policy=policy)
        self.ids: list[str] = []
        self.generating: list[str] = []

    def id_at(self, index: int, where: dict[str, object]) -> str | None:
        ids = [id for id in self.ids if id in where]
        return ids[index % len(ids)] if ids else None

    # Requests.

    @rule(num_tokens=st.integers(1, 100), cached=st.integers(0, 127), order=st.sampled_from(["pd", "dp", "p", "d"]))
    def request(self, num_tokens: int, cached: int, order: str) -> None:
        id = f"r{len(self.ids)}"
        self.ids.append(id)
        self.world.num_tokens[id] = num_tokens
        positions = positions_of(num_tokens)
        self.world.cached[id] = {p for bit, p in enumerate(positions) if cached >> bit & 1}
        for side in order:
            self.half(id, side)

    def half(self, id: str, side: str) -> None:
        if side == "p":
            self.world.offer(id, self.world.num_tokens[id], cached=self.world.cached[id])
        else:
            self.world.expect(id)

    @rule(index=INDEX)
    def other_half(self, index: int) -> None:
        missing = [id for id in self.ids if (id in self.world.p_ends) != (id in self.world.d_ends)]
        if missing:
            id = missing[index % len(missing)]
            self.half(id, "d" if id in self.world.p_ends else "p")

    @rule(index=INDEX, upto=st.integers(0, 6))
    def compute_chunk(self, index: int, upto: int) -> None:
        id = self.id_at(index, self.world.p_of)
        if id is not None and id not in self.generating and id not in self.world.p_tokens:
            self.world.ready(id, positions_of(self.world.num_tokens[id])[:upto])

    @rule(index=INDEX)
    def compute(self, index: int) -> None:
        id = self.id_at(index, self.world.p_of)
        if id is not None and id not in self.generating and id not in self.world.unpinned:
            self.world.compute(id)

    # Holds.

    def hold_at(self, index: int) -> str | None:
        holds = [id for id in self.ids if id in self.world.p_of and self.world.is_hold(id)]
        return holds[index % len(holds)] if holds else None

    @rule(index=INDEX)
    def unpin(self, index: int) -> None:
        id = self.hold_at(index)
        if id is not None:
            self.world.unpin(id)

    @rule(index=INDEX)
    def begin_decode_on(self, index: int) -> None:
        id = self.hold_at(index)
        if id is not None:
            self.world.begin_decode_on(id)
            self.generating.append(id)

    @precondition(lambda self: self.generating)
    @rule(index=INDEX)
    def end_decode_on(self, index: int) -> None:
        self.world.end_decode_on(self.generating.pop(index % len(self.generating)))

    @rule(index=INDEX, other_half=st.booleans())
    def retarget(self, index: int, other_half: bool) -> None:
        """The router sends a finished prompt to another receiver, whatever has become of the first."""
        world = self.world
        finished = [id for id in self.ids if id in world.p_of and id in world.p_tokens and id not in self.generating]
        finished = [id for id in finished if not world.p_ends[id] and id not in world.unpinned]
        if finished:
            id, new_id = finished[index % len(finished)], f"r{len(self.ids)}"
            self.ids.append(new_id)
            world.num_tokens[new_id] = world.num_tokens[id]
            world.retarget(id, new_id)
            if other_half:
                world.expect(new_id)

    @rule(index=INDEX, how=st.sampled_from(["not_needed", "abort"]))
    def end_at_sender(self, index: int, how: str) -> None:
        id = self.id_at(index, self.world.p_of)
        if id is not None:
            getattr(self.world, how)(id)

    @rule(index=INDEX)
    def cancel(self, index: int) -> None:
        id = self.id_at(index, self.world.d_of)
        if id is not None:
            self.world.cancel(id)

    @precondition(lambda self: self.world.wanted)
    @rule(index=INDEX, how=st.sampled_from(["grant", "grant", "grant", "refuse"]))
    def answer(self, index: int, how: str) -> None:
        id = list(self.world.wanted)[index % len(self.world.wanted)]
        getattr(self.world, how)(id)

    # Network.

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

    @rule(steps=st.integers(1, 30))
    def all_goes_well(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    # Mover.

    @precondition(lambda self: self.world.network)
    @rule()
    def all_messages_arrive(self) -> None:
        for _ in range(len(self.world.network)):
            self.world.deliver()

    @precondition(lambda self: self.world.flights)
    @rule(index=INDEX, fate=st.sampled_from(["land", "land", "land", "fail"]))
    def write(self, index: int, fate: str) -> None:
        index %= len(self.world.flights)
        if fate == "land":
            self.world.land_write(index)
        else:
            self.world.fail_write(index)

    @precondition(lambda self: self.world.landings)
    @rule(index=INDEX)
    def landing(self, index: int) -> None:
        self.world.finish_landing(index % len(self.world.landings))

    @precondition(lambda self: self.world.landings)
    @rule(index=INDEX)
    def corrupt(self, index: int) -> None:
        landing = self.world.landings[index % len(self.world.landings)]
        self.world.corrupt(next(iter(landing.pieces.values())).slot)

    # Time and processes.

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.25, 0.5, 1.0]), times=st.integers(1, 6))
    def time_passes(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.world.advance(seconds)

    @rule(who=st.sampled_from(["p", "d", "nobody", "nobody", "nobody", "nobody"]))
    def restart(self, who: str) -> None:
        if who == "p":
            self.world.start_p()
        elif who == "d":
            self.world.start_d()

    # The end.

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        while self.generating:
            self.end_decode_on(0)
        world.run(1.0)
        # The nodes' own deadlines: requests that the other half never reached, and prompts that are not computed.
        for id in list(world.d_of):
            if id not in world.p_of:
                world.cancel(id)
        for id in list(world.p_of):
            if id not in world.unpinned:
                world.compute(id)
        world.run(BOUND_S)
        # Nobody tells a receiver of a hand-off that was never offered; the router does, when the sender's half fails.
        for id, d_link in world.d_of.items():
            waiting = d_link._receiver._handoffs.get(id)
            if waiting is not None and waiting.offer is None:
                world.cancel(id)
        world.run(1.0)
        for link in world.p_links:
            assert link.open_ids == []
            assert link._sender.describe() == {}, "the sender still speaks of something"
        for id, p_link in world.p_of.items():
            assert p_link not in world.p_links or world.p_ends[id], f"{id} never ended at the sender"
        for id, d_link in world.d_of.items():
            assert d_link not in world.d_links.values() or world.d_ends[id], f"{id} never ended at the receiver"
        for d_link in world.d_links.values():
            assert d_link.open_ids == []
            assert d_link._receiver.describe() == {}, "the receiver still speaks of something"
        assert set(world.num_free_slots()) <= {world.num_slots}, "slots leaked"
        # And it works again.
        world.num_tokens["last"] = 40
        world.expect("last")
        world.offer("last", 40)
        world.compute("last")
        world.run(4.0)
        assert isinstance(world.d_ends["last"][0], Completed)
        assert world.p_ends["last"] == [Ended("last", HandedOver())]


TestHandOffs = pytest.mark.slow(HandOffs.TestCase)
TestHandOffs.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
