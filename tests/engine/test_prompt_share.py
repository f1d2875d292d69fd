"""How many prompt tokens a step may have beside decodes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from pdserve_engine.prompt_share import AIM, UNMEASURED_TOKENS, PromptShare

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
    assert share.tokens_per_s(1, BUDGET) == 0.0


def test_prompts_get_what_decodes_leave_of_the_target() -> None:
    share = share_of()
    share.observe(0, 500, 0.5)
    share.observe(4, 0, 0.02)
    assert share.num_tokens(4, BUDGET) == int(1000 * AIM * TARGET_S) - 20
    assert share.tokens_per_s(4, BUDGET) == pytest.approx(27 / 0.047)
    assert share.tokens_per_s(0, BUDGET) == pytest.approx(BUDGET / (0.02 + BUDGET * 0.001))


def test_slow_decodes_leave_a_block() -> None:
    share = share_of()
    share.observe(0, 500, 0.5)
    share.observe(64, 0, 0.2)
    assert share.num_tokens(64, BUDGET) == BLOCK


def test_one_step_that_was_held_up_does_not_stop_prompts() -> None:
    share = share_of()
    share.observe(0, 500, 0.5)
    share.observe(4, 0, 0.02)
    before = share.num_tokens(4, BUDGET)
    share.observe(4, before, 30.0)
    assert share.num_tokens(4, BUDGET) > before / 2


def test_tiny_rests_of_prompts_tell_nothing_of_prompts() -> None:
    share = share_of()
    share.observe(0, 3, 0.02)
    assert share.token_s is None


@given(
    decode_ms=st.floats(1, 45),
    token_ms=st.floats(0.01, 3),
    wrong=st.floats(0.2, 5),
    decodes_alone=st.booleans(),
)
def test_steps_come_to_last_the_target_whatever_was_believed_before(
    decode_ms: float, token_ms: float, wrong: float, decodes_alone: bool
) -> None:
    """Prompts all the time: decodes are never measured alone again, or now and then."""
    share = PromptShare(TARGET_S, 1)
    share.observe(4, 0, wrong * decode_ms / 1000)
    share.observe(0, 500, 0.5 * token_ms / wrong)
    for step in range(120):
        num_tokens = share.num_tokens(4, 1 << 20)
        assert num_tokens >= 1
        seconds = (decode_ms + num_tokens * token_ms) / 1000
        share.observe(4, num_tokens, seconds)
        if decodes_alone and step % 3 == 0:
            share.observe(4, 0, decode_ms / 1000)
    num_tokens = share.num_tokens(4, 1 << 20)
    seconds = (decode_ms + num_tokens * token_ms) / 1000
    assert seconds <= 1.1 * TARGET_S + token_ms / 1000
    assert share.token_s is not None
    assert seconds >= 0.9 * TARGET_S - max(share.token_s, token_ms / 1000), (
        "one token more would be expected to be late"
    )
