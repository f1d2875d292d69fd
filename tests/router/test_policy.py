"""Who takes a request, by numbers alone."""

from __future__ import annotations

from hypothesis import given, strategies as st
from pdserve_router.policy import ALIKE, CLEARLY, InTurn, Load, decode_costs, is_quicker_alone, prefill_costs

ROOM = 1 << 20

tokens = st.integers(1, 100_000)
rates = st.one_of(st.just(0.0), st.floats(1.0, 1e6))
loads = st.builds(
    lambda pending, rate: Load(pending_tokens=pending, tokens_per_s=rate, free_tokens=1 << 30),
    st.one_of(st.just(0), tokens),
    rates,
)


def busy(pending: int, rate: float = 0.0, free: int = ROOM) -> Load:
    return Load(pending_tokens=pending, tokens_per_s=rate, free_tokens=free)


def test_equal_nodes_are_taken_in_turn() -> None:
    turn = InTurn()
    assert [turn.choose([0, 0, 0]) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert [turn.choose([0, 1, 0]) for _ in range(3)] == [2, 0, 2], "of the best ones"
    assert turn.choose([0]) == 0, "others have gone"


def test_waits_that_are_alike_are_equal() -> None:
    turn = InTurn(ALIKE)
    assert [turn.choose([1.0, 1.2, 1.3]) for _ in range(3)] == [0, 1, 0]


def test_idle_nodes_are_equal_whatever_they_said() -> None:
    # One slow sample must not be the last.
    assert prefill_costs([busy(0, 1.0), busy(0, 500.0), busy(500, 500.0)], 500) == [1.0, 1.0, 2.0]
    assert prefill_costs([busy(0, 1.0), busy(500, 500.0)], 500) == [500.0, 2.0]


@given(costs=st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=5), before=st.integers(0, 7))
def test_the_chosen_one_is_among_the_best(costs: list[float], before: int) -> None:
    turn = InTurn()
    for _ in range(before):
        turn.choose([0.0] * 5)
    assert costs[turn.choose(costs)] == min(costs)


def test_the_prefill_node_with_the_shortest_wait() -> None:
    assert prefill_costs([busy(500, 100.0), busy(2500, 1000.0)], 500) == [10.0, 3.0]


def test_a_prefill_node_that_has_not_measured_is_taken_for_one_like_the_others() -> None:
    assert prefill_costs([busy(200, 100.0), busy(200), busy(200, 300.0)], 400) == [6.0, 3.0, 2.0]
    assert prefill_costs([busy(100), busy(50)], 50) == [150.0, 100.0]


def test_the_decode_node_with_the_fewest_streams() -> None:
    assert decode_costs([Load(attempts=3), Load(attempts=1)]) == [3, 1]


@given(prefill_rate=rates, decode=loads, num_tokens=tokens)
def test_an_idle_prefill_node_always_gets_the_prompt(prefill_rate: float, decode: Load, num_tokens: int) -> None:
    assert not is_quicker_alone(Load(tokens_per_s=prefill_rate), decode, num_tokens)


@given(prefill=loads, decode=loads, num_tokens=tokens, more=tokens)
def test_a_longer_queue_never_turns_the_choice_the_other_way(
    prefill: Load, decode: Load, num_tokens: int, more: int
) -> None:
    if is_quicker_alone(prefill, decode, num_tokens):
        assert is_quicker_alone(
            busy(prefill.pending_tokens + more, prefill.tokens_per_s), busy(0, decode.tokens_per_s), 1
        )
        assert is_quicker_alone(busy(prefill.pending_tokens + more, prefill.tokens_per_s), decode, num_tokens), (
            "the prefill node is busier still"
        )
    else:
        busier = busy(decode.pending_tokens + more, decode.tokens_per_s)
        assert not is_quicker_alone(prefill, busier, num_tokens), "the decode node is busier"


@given(prefill=st.integers(0, 10**5), decode=st.integers(0, 10**5), num_tokens=tokens, rate=st.floats(1.0, 1e6))
def test_measured_rates_are_compared_with_a_margin(prefill: int, decode: int, num_tokens: int, rate: float) -> None:
    alone = is_quicker_alone(busy(prefill, rate), busy(decode, rate), num_tokens)
    assert alone == (prefill > 0 and decode + num_tokens < CLEARLY * (prefill + num_tokens))


def test_without_a_rate_a_decode_node_is_half_as_fast() -> None:
    for prefill_rate, decode_rate in ((0.0, 0.0), (800.0, 0.0), (0.0, 400.0), (800.0, 400.0)):
        assert not is_quicker_alone(busy(512, prefill_rate), busy(0, decode_rate), 512)
        assert is_quicker_alone(busy(2 * 512, prefill_rate), busy(0, decode_rate), 512)


def test_a_burst_is_shared_by_the_rates() -> None:
    prefill, decode = 0, 0
    for _ in range(40):
        if is_quicker_alone(busy(prefill, 850.0), busy(decode, 550.0), 512):
            decode += 512
        else:
            prefill += 512
    assert 24 * 512 <= prefill <= 32 * 512


def test_a_decode_node_without_room_is_left_alone() -> None:
    assert is_quicker_alone(busy(10_000), busy(100, free=600), 500)
    assert not is_quicker_alone(busy(10_000), busy(100, free=599), 500)


def test_a_decode_node_without_a_free_slot_is_left_alone() -> None:
    for requests, max_num_seqs, alone in ((7, 8, True), (8, 8, False), (9, 8, False), (9, 0, True)):
        decode = Load(free_tokens=ROOM, requests=requests, max_num_seqs=max_num_seqs)
        assert is_quicker_alone(busy(10_000), decode, 500) == alone


def test_what_is_cached_is_not_waited_for() -> None:
    # Three requests of 8k each, nine tenths of which the prefill node has.
    prefill = Load(pending_tokens=24_000, tokens_per_s=1000.0, computed_share=0.1)
    assert prefill_costs([prefill, busy(1000, 1000.0)], 8000) == [3.2, 9.0]
    assert is_quicker_alone(busy(24_000, 1000.0), busy(0, 1000.0), 8000)
    assert not is_quicker_alone(prefill, busy(0, 1000.0), 8000)
