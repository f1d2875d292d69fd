"""Two engines with tiny pools under random interleavings of everything that can happen to a request.

The fake executor fails a step that reads a wrong KV entry, and computes a step only when it is completed, so that
blocks which were handed out too early are overwritten late. Two steps may be in flight. Whatever the order: every
request gets exactly one end, its tokens are the model's up to their end, and no block is lost.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pdserve_engine.errors import DoesNotFit
from pdserve_engine.request import RequestStatus
from pdserve_protocol.outputs import Failed, Finished
from support.engines import BLOCK, RECEIVE, SEND, VOCAB, Engine, oracle, transfer

HALVES = {"send": {"send_to": SEND}, "receive": {"receive_from": RECEIVE}}

# One in seventeen: most outputs reach their length.
END_IDS = range(0, VOCAB, 17)

# Few token ids and starts, so that prompts share prefixes.
prompts = st.builds(
    lambda start, length: list(range(start, start + length)), st.sampled_from([0, 0, 50]), st.integers(1, 22)
)
indexes = st.integers(0, 10**6)


def until_end(tokens: list[int]) -> list[int]:
    """Tokens up to the first end id."""
    return tokens[: next((index + 1 for index, token in enumerate(tokens) if token in END_IDS), len(tokens))]


class TwoEngines(RuleBasedStateMachine):
    """``p`` computes prompts and hands over, ``d`` takes over and also computes whole requests."""

    @initialize(
        seqs=st.integers(1, 4),
        budget=st.integers(2, 12),
        blocks=st.integers(7, 14),
        itl_target_s=st.sampled_from([None, 0.001, 4.0]),
    )
    def start(self, seqs: int, budget: int, blocks: int, itl_target_s: float | None) -> None:
        self.p, self.d = (
            Engine(
                num_blocks=blocks,
                max_num_seqs=seqs,
                max_num_batched_tokens=budget,
                end_token_ids=END_IDS,
                itl_target_s=itl_target_s,
                manual=True,
            )
            for _ in range(2)
        )
        self.engines = [self.p, self.d]
        self.prompts: dict[str, list[int]] = {}
        self.max_tokens: dict[str, int] = {}
        self.needed: dict[str, list[int]] = {}
        self.failed: set[str] = set()

    # ---- what happens ----------------------------------------------------------------------------------------

    @rule(prompt=prompts, max_tokens=st.integers(1, 14), which=st.integers(0, 1))
    def add_whole(self, prompt: list[int], max_tokens: int, which: int) -> None:
        self.add(f"w{len(self.prompts)}", prompt, max_tokens, [(self.engines[which], {})])

    @rule(prompt=prompts, max_tokens=st.integers(2, 14), prefix=st.integers(0, 3))
    def add_halves(self, prompt: list[int], max_tokens: int, prefix: int) -> None:
        fields = {"output_token_ids": until_end(oracle(prompt, min(prefix, max_tokens - 2)))[:-1]}
        halves = [(self.p, HALVES["send"] | fields), (self.d, HALVES["receive"] | fields)]
        self.add(f"h{len(self.prompts)}", prompt, max_tokens, halves)

    def add(self, request_id: str, prompt: list[int], max_tokens: int, halves: list) -> None:
        added = []
        for engine, fields in halves:
            try:
                engine.add(request_id, prompt, max_tokens, **fields)
            except DoesNotFit:
                assert len(prompt) + max_tokens > engine.core.limits.kv_capacity_tokens
                for other in added:
                    other.abort(request_id)
                break
            added.append(engine)
        self.prompts[request_id] = prompt
        self.max_tokens[request_id] = max_tokens

    @rule(which=st.integers(0, 1))
    def begin(self, which: int) -> None:
        self.engines[which].begin()

    @rule(which=st.integers(0, 1))
    def complete(self, which: int) -> None:
        if self.engines[which].num_in_flight:
            for result in self.engines[which].complete():
                if isinstance(result.finish, Failed):
                    assert result.finish.message == "FakeDeviceError: injected", result.finish.message
                    self.failed.add(result.request.request_id)

    @rule(which=st.integers(0, 1), index=indexes)
    def abort(self, which: int, index: int) -> None:
        live = sorted(self.engines[which].scheduler.requests)
        if live:
            self.engines[which].abort(live[index % len(live)])

    @precondition(lambda self: any(engine.num_in_flight for engine in self.engines))
    @rule(which=st.integers(0, 1))
    def fail_step(self, which: int) -> None:
        if self.engines[which].num_in_flight and len(self.failed) < 3:
            self.engines[which].executor.fail_next("injected")
            self.complete(which)

    @rule(index=indexes)
    def reserve(self, index: int) -> None:
        waiting = [r for r in self.receivers() if r not in self.needed]
        if waiting:
            request_id = waiting[index % len(waiting)]
            needed = self.d.scheduler.reserve(request_id)
            if needed is not None:
                self.needed[request_id] = needed

    @rule(index=indexes, num_bad=st.sampled_from([0, 0, 0, 1, 2, 99]))
    def hand_over(self, index: int, num_bad: int) -> None:
        """The KV of a held request arrives, its last ``num_bad`` blocks damaged."""
        ready = [r for r in self.receivers() if r in self.needed and self.held(r)]
        if ready:
            request_id = ready[index % len(ready)]
            known = self.d.scheduler.requests[request_id].num_tokens
            needed = self.needed.pop(request_id)
            good = needed[: max(0, len(needed) - num_bad)]
            transfer(self.p, self.d, request_id, good)
            num_computed = known if good == needed else needed[len(good)] * BLOCK
            self.arrive(request_id, self.p.tokens[request_id], num_computed)
            self.p.scheduler.release_held(request_id)
            self.p.ends[request_id].append("handed over")

    @rule(index=indexes)
    def no_kv_will_come(self, index: int) -> None:
        waiting = self.receivers()
        if waiting:
            request_id = waiting[index % len(waiting)]
            all_cached = self.needed.pop(request_id, None) == []
            known = self.d.scheduler.requests[request_id].num_tokens
            self.arrive(request_id, self.d.tokens[request_id], known if all_cached else 0)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.d.scheduler.reset_prefix_cache()

    def arrive(self, request_id: str, output_token_ids: list[int], num_computed: int) -> None:
        result = self.d.scheduler.kv_arrived(request_id, output_token_ids, num_computed, self.d.tick())
        self.d.tokens[request_id] = list(output_token_ids)
        assert result is None

    def receivers(self) -> list[str]:
        requests = self.d.scheduler.requests
        return sorted(r for r in requests if requests[r].status is RequestStatus.WAITING_FOR_KV)

    def held(self, request_id: str) -> bool:
        request = self.p.scheduler.requests.get(request_id)
        return request is not None and request.status is RequestStatus.HELD

    # ---- what must hold --------------------------------------------------------------------------------------

    @invariant()
    def blocks_add_up(self) -> None:
        for engine in getattr(self, "engines", []):
            engine.check_blocks()

    @invariant()
    def what_a_step_writes_is_nobody_else_s(self) -> None:
        for engine in getattr(self, "engines", []):
            pool = engine.scheduler.kv.pool
            for blocks in engine.blocks_being_written():
                assert all(pool.ref_count(block) == 1 for block in blocks)

    @invariant()
    def counts_fit_the_steps_in_flight(self) -> None:
        for engine in getattr(self, "engines", []):
            for request_id, request in engine.scheduler.requests.items():
                in_steps = [step for step in engine.scheduler._steps if request in step.requests]
                assert request.num_tokens_in_flight == sum(
                    step.output.num_scheduled_tokens[request_id] for step in in_steps
                )
                assert request.num_output_placeholders <= len(in_steps)

    @invariant()
    def pinned_is_never_preempted(self) -> None:
        for engine in getattr(self, "engines", []):
            assert not any(r.num_preemptions for r in engine.scheduler.requests.values() if r.pinned)

    def teardown(self) -> None:
        for _ in range(2000):
            if not any(engine.scheduler.requests for engine in self.engines):
                break
            for which in (0, 1):
                self.complete(which)
                self.begin(which)
                self.begin(which)
            for index in range(len(self.receivers())):
                self.reserve(index)
                self.hand_over(0, 0)
            self.drop_orphans()
            if not any(engine.num_in_flight for engine in self.engines):
                self.give_up_one_hold()
        for engine in self.engines:
            while engine.num_in_flight:
                self.complete(self.engines.index(engine))
            usage = engine.scheduler.usage()
            assert not engine.scheduler.requests
            assert usage.free + usage.cached == usage.total
            assert {r: ends for r, ends in engine.ends.items() if len(ends) != 1} == {}
            for request_id, tokens in engine.tokens.items():
                expected = until_end(oracle(self.prompts[request_id], self.max_tokens[request_id]))
                assert tokens == expected[: len(tokens)]
                if isinstance(engine.ends[request_id][0], Finished):
                    assert tokens == expected

    def give_up_one_hold(self) -> None:
        """Each engine may be full of what the other one waits for; a hold that gets no room ends by its deadline."""
        held = [r for r in self.p.scheduler.requests if self.held(r) and r not in self.needed]
        if held:
            self.p.abort(held[0])

    def drop_orphans(self) -> None:
        """A half whose other half is gone ends too."""
        for request_id in self.receivers():
            if request_id not in self.p.scheduler.requests:
                self.d.abort(request_id)
        for request_id in list(self.p.scheduler.requests):
            if self.held(request_id) and request_id not in self.receivers():
                self.p.abort(request_id)


TestTwoEngines = pytest.mark.slow(TwoEngines.TestCase)
TestTwoEngines.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
