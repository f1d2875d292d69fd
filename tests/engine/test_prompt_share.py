"""How many prompt tokens a step may have beside decodes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from pdserve_engine.prompt_share import AIM, LEAST, UNMEASURED_TOKENS, PromptShare

TARGET_S = 0.05
BLOCK = 16
BUDGET = 512


def share_of(target_s: float | None = TARGET_S) -> PromptShare:
    return PromptShare(target_s, BLOCK)


def test_without_decodes_or_a_target_there_is_no_limit() -> None:
    share = share_of()
    share.observe(1, 0, 1.0)
    share.observe(1, 1, 1.0)
    assert share.num_tokens(0, BUDGET) == BUDGET
    assert share_of(None).num_tokens(9, BUDGET) == BUDGET


def test_before_anything_was_measured_it_is_little() -> None:
    share = share_of()
    assert share.num_tokens(1, BUDGET) == UNMEASURED_TOKENS
    assert share.num_tokens(1, 20) == 20
    share.observe(4, 0, 0.016)
    assert share.num_tokens(1, BUDGET) == UNMEASURED_TOKENS, "of prompts nothing is known"
    assert share.least_tokens_per_s(BUDGET) == 0.0


def measured(of_its_own_ms: float, decode_ms: float, token_ms: float) -> PromptShare:
    """One that has seen steps of every kind."""
    share = share_of()
    for step in range(60):
        num_decodes, num_tokens = step % 7, step % 5 * 20
        if num_decodes + num_tokens:
            seconds = (of_its_own_ms + num_decodes * decode_ms + num_tokens * token_ms) / 1000
            share.observe(num_decodes, num_tokens, seconds)
    return share


def test_prompts_get_what_decodes_leave_of_the_target() -> None:
    share = measured(10, 2, 0.5)
    assert share.step_s(4, 100) == pytest.approx(0.068, rel=0.01)
    assert share.num_tokens(4, BUDGET) == pytest.approx((1000 * AIM * TARGET_S - 18) / 0.5, abs=1)


def test_decodes_that_fill_the_target_leave_a_part_of_their_time() -> None:
    share = measured(10, 2, 0.5)
    num_tokens = share.num_tokens(60, BUDGET)
    assert num_tokens == pytest.approx(LEAST * 130 / 0.5, abs=2)
    assert share.least_tokens_per_s(BUDGET) == pytest.approx(num_tokens / share.step_s(60, num_tokens), rel=0.05)


def test_slow_prompts_have_a_block() -> None:
    assert measured(10, 2, 40).num_tokens(60, BUDGET) == BLOCK


def test_decodes_that_become_more_are_not_taken_for_slow_prompts() -> None:
    """Beside the same number of prompt tokens all the time, of which nothing tells how long they take."""
    share = measured(20, 2, 0.3)
    for step in range(200):
        num_decodes = min(30, step // 5)
        share.observe(num_decodes, BLOCK, (20 + num_decodes * 2 + BLOCK * 0.3) / 1000)
    assert share.num_tokens(30, BUDGET) == pytest.approx(LEAST * 80 / 0.3, rel=0.1)


def test_one_step_that_was_held_up_does_not_stop_prompts() -> None:
    share = measured(10, 2, 0.5)
    before = share.num_tokens(4, BUDGET)
    share.observe(4, before, 30.0)
    assert share.num_tokens(4, BUDGET) > before / 2


def test_a_step_that_seems_to_take_no_time_does_not_make_the_next_ones_long() -> None:
    share = measured(10, 2, 0.5)
    before = share.num_tokens(4, BUDGET)
    share.observe(4, before, 1e-6)
    assert share.num_tokens(4, BUDGET) < 2 * before


def test_tiny_rests_of_prompts_tell_nothing_of_prompts() -> None:
    share = share_of()
    share.observe(0, 3, 0.02)
    assert share.num_tokens(1, BUDGET) == UNMEASURED_TOKENS


@given(
    own_ms=st.floats(1, 45),
    decode_ms=st.floats(0, 10),
    token_ms=st.floats(0.01, 3),
    wrong=st.floats(0.2, 5),
    decodes_alone=st.booleans(),
)
def test_steps_come_to_last_the_target_or_a_part_more_than_decodes_whatever_was_believed_before(
    own_ms: float, decode_ms: float, token_ms: float, wrong: float, decodes_alone: bool
) -> None:
    """Prompts all the time, streams come and go: decodes are never measured alone again, or now and then."""

    def seconds(num_decodes: int, num_tokens: int) -> float:
        return (own_ms + num_decodes * decode_ms + num_tokens * token_ms) / 1000

    share = PromptShare(TARGET_S, 1)
    share.observe(4, 0, wrong * seconds(4, 0))
    share.observe(0, 500, seconds(0, 500) / wrong)
    for step in range(150):
        num_decodes = 1 + step % 8
        num_tokens = share.num_tokens(num_decodes, 1 << 20)
        assert num_tokens >= 1
        share.observe(num_decodes, num_tokens, seconds(num_decodes, num_tokens))
        if decodes_alone and step % 3 == 0:
            share.observe(num_decodes, 0, seconds(num_decodes, 0))
    num_tokens = share.num_tokens(4, 1 << 20)
    longest = max(TARGET_S, (1 + LEAST) * seconds(4, 0))
    assert seconds(4, num_tokens) <= 1.2 * longest + token_ms / 1000
    assert seconds(4, num_tokens) >= 0.8 * TARGET_S - token_ms / 1000, "one token more would be late"
