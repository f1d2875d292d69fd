"""The oracle notices every wrong KV entry that a step reads, and answers the same whoever computed the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from pdserve_engine.errors import WrongKV
from pdserve_engine.oracle import OracleWorker, expected_tokens
from pdserve_engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from pdserve_protocol.sampling import SamplingParams

BLOCK = 4
VOCAB = 50
PROMPT = [7, 3, 9, 9, 1, 30, 2, 8, 8, 41]


def first_step(blocks: list[int], *, num_computed: int = 0, num_scheduled: int | None = None) -> SchedulerOutput:
    num_scheduled = len(PROMPT) - num_computed if num_scheduled is None else num_scheduled
    new = NewRequestData("r", PROMPT, len(PROMPT), SamplingParams(), blocks, num_computed)
    return SchedulerOutput([new], CachedRequestData(), {"r": num_scheduled}, num_scheduled, {}, set())


def next_step(num_computed: int, num_scheduled: int = 1) -> SchedulerOutput:
    cached = CachedRequestData(["r"], [[]], [num_computed])
    return SchedulerOutput([], cached, {"r": num_scheduled}, num_scheduled, {}, set())


def test_it_answers_with_the_tokens_that_are_expected_however_the_prompt_is_cut() -> None:
    expected = expected_tokens(PROMPT, 2, VOCAB)
    whole, cut = (OracleWorker(8, BLOCK, VOCAB) for _ in range(2))
    assert whole.execute_model(first_step([5, 0, 3])).sampled_token_ids == {"r": expected[:1]}
    assert cut.execute_model(first_step([5, 0, 3], num_scheduled=7)).sampled_token_ids == {}
    assert cut.execute_model(next_step(7, 3)).sampled_token_ids == {"r": expected[:1]}
    assert cut.execute_model(next_step(10)).sampled_token_ids == {"r": expected[1:]}


def test_blocks_that_another_oracle_has_computed_will_do() -> None:
    sender, receiver = (OracleWorker(8, BLOCK, VOCAB) for _ in range(2))
    sender.execute_model(first_step([1, 2, 3]))
    receiver.kv_bytes()[[6, 4, 5]] = sender.kv_bytes()[[1, 2, 3]]
    output = receiver.execute_model(first_step([6, 4, 5], num_computed=9))
    assert output.sampled_token_ids == {"r": expected_tokens(PROMPT, 1, VOCAB)}


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, len(PROMPT) - 1), where=st.integers(0, 63), bit=st.integers(0, 7))
def test_one_wrong_bit_in_any_entry_is_noticed(position: int, where: int, bit: int) -> None:
    worker = OracleWorker(8, BLOCK, VOCAB)
    worker.execute_model(first_step([1, 2, 3]))
    block = worker.kv_bytes()[[1, 2, 3][position // BLOCK]].reshape(2, 2, BLOCK, 16)
    layer, rest = divmod(where, 32)
    block[layer, rest // 16, position % BLOCK, rest % 16] ^= 1 << bit
    with pytest.raises(WrongKV, match=f"position {position} "):
        worker.execute_model(next_step(len(PROMPT)))


def test_two_blocks_that_were_exchanged_are_noticed() -> None:
    worker = OracleWorker(8, BLOCK, VOCAB)
    worker.execute_model(first_step([1, 2, 3]))
    worker.kv_bytes()[[1, 2]] = worker.kv_bytes()[[2, 1]]
    with pytest.raises(WrongKV, match="position 0 "):
        worker.execute_model(next_step(len(PROMPT)))
