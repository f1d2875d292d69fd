"""Choices that go on from the prompt of another one: full blocks are shared, the rest is computed, each ends alone."""

from __future__ import annotations

import pytest
from support.engines import BLOCK, RECEIVE, SEND, Engine, oracle, transfer


def taken_over(length: int, **options: int) -> Engine:
    """A decode node whose request "first" has taken over the KV of a prompt of ``length`` tokens."""
    prefill, decode = Engine(num_blocks=64), Engine(**options)  # type: ignore[arg-type]
    prefill.add("first", range(length), 12, send_to=SEND)
    decode.add("first", range(length), 12, receive_from=RECEIVE)
    prefill.run()
    needed = decode.scheduler.reserve("first")
    assert needed is not None
    transfer(prefill, decode, "first", needed)
    decode.scheduler.kv_arrived("first", prefill.tokens["first"], length, decode.tick())
    decode.tokens["first"] = list(prefill.tokens["first"])
    decode.step()
    return decode


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 2])
def test_full_blocks_are_shared_and_the_rest_is_computed(length: int) -> None:
    engine = taken_over(length)
    own = engine.scheduler.block_ids("first")
    computed = engine.core.counters.prompt_tokens_computed
    for choice in (1, 2):
        engine.add(f"fork{choice}", range(length), 5, choice=choice)
    requests = dict(engine.scheduler.requests)
    engine.step()
    # The last prompt token is always computed: what follows it is sampled here.
    num_shared = (length - 1) // BLOCK
    for choice in (1, 2):
        fork = requests[f"fork{choice}"]
        assert fork.num_cached_tokens == num_shared * BLOCK
        assert engine.scheduler.block_ids(fork.request_id)[:num_shared] == own[:num_shared]
    assert engine.core.counters.prompt_tokens_computed - computed == 2 * (length - num_shared * BLOCK)
    assert engine.scheduler.usage().in_use <= len(own) + 1 + 2 * 2
    engine.run()
    assert engine.tokens["first"] == oracle(range(length), 12)
    assert engine.tokens["fork1"] == engine.tokens["fork2"] == oracle(range(length), 5)
    engine.check_empty()


@pytest.mark.parametrize("ended", [["first"], ["fork1"], ["first", "fork1", "fork2"]])
def test_each_can_be_aborted_alone(ended: list[str]) -> None:
    engine = taken_over(10)
    for name in ("fork1", "fork2"):
        engine.add(name, range(10), 12)
    engine.step()
    for name in ended:
        engine.abort(name)
        engine.check_blocks()
    engine.run()
    for name in {"first", "fork1", "fork2"} - set(ended):
        assert engine.tokens[name] == oracle(range(10), 12)
    engine.check_empty()


def test_forks_are_preempted_and_go_on() -> None:
    # The shared blocks are there once: 3 choices of 10 + 12 tokens do not fit 9 blocks together.
    engine = taken_over(10, num_blocks=9)
    for name in ("fork1", "fork2"):
        engine.add(name, range(10), 12)
    engine.run()
    assert engine.core.counters.preemptions > 0
    assert engine.tokens["first"] == engine.tokens["fork1"] == engine.tokens["fork2"] == oracle(range(10), 12)
    engine.check_empty()
