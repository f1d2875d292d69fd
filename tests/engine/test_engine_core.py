"""EngineCore over the fake executor: what comes out, what is refused, what is counted."""

from __future__ import annotations

import pytest
from pdserve_engine.errors import BadRequest, DoesNotFit, RequestRejected
from pdserve_engine.request import RequestEvent
from pdserve_protocol.outputs import Failed, Finished
from pdserve_protocol.sampling import SamplingParams
from support.engines import BLOCK, RECEIVE, SEND, VOCAB, Engine, oracle


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_output_is_the_model_s(length: int, depth: int) -> None:
    engine = Engine(manual=True, depth=depth)
    engine.add("a", range(length), 5)
    engine.run()
    assert engine.tokens["a"] == oracle(range(length), 5)
    assert engine.finished("a") == Finished(reason="length")
    engine.check_empty()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK])
def test_whole_prompt_cached_recomputes_and_gives_the_same(length: int) -> None:
    # B06: at least the last prompt token is computed again; the second answer equals the first.
    engine = Engine()
    engine.add("first", range(length), 3)
    engine.run()
    engine.add("second", range(length), 3)
    (result,) = engine.step()
    assert result.request.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert len(result.new_token_ids) == 1
    engine.run()
    assert engine.tokens["second"] == engine.tokens["first"]
    engine.check_empty()


@pytest.mark.parametrize("length", [7, 8, 9, 25])
def test_prompts_longer_than_the_budget_come_in_chunks(length: int) -> None:
    # B15: chunk - 1, chunk, chunk + 1, 3 chunks + 1; then two that share a budget.
    engine = Engine(max_num_batched_tokens=8, prefix_caching=False, num_blocks=32)
    engine.add("alone", range(length), 3)
    progress = [result.num_computed_tokens for _ in range(-(-length // 8)) for result in engine.step()]
    assert progress == [*range(8, length, 8), length]
    engine.run()
    engine.add("one", range(length), 3)
    engine.add("two", range(100, 100 + length), 3)
    engine.run()
    assert engine.tokens["alone"] == engine.tokens["one"] == oracle(range(length), 3)
    assert engine.tokens["two"] == oracle(range(100, 100 + length), 3)
    engine.check_empty()


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    engine = Engine(max_num_batched_tokens=4)
    engine.add("short", [1], 8)
    engine.step()
    engine.add("long", range(20), 2)
    for _ in range(5):
        assert [len(r.new_token_ids) for r in engine.step() if r.request.request_id == "short"] == [1]
    engine.run()
    assert engine.tokens["long"] == oracle(range(20), 2)


def test_prefix_hits_need_retired_steps_and_the_same_salt() -> None:
    # B21, over the whole engine.
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", range(16), 1)
    engine.step()
    engine.add("b", range(16), 1)
    engine.add("salted", range(16), 1, cache_salt="s")
    requests = dict(engine.scheduler.requests)
    engine.run()
    assert 0 < requests["b"].num_cached_tokens <= 12
    assert requests["salted"].num_cached_tokens == 0
    assert engine.tokens["a"] == engine.tokens["b"] == engine.tokens["salted"] == oracle(range(16), 1)


def test_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    # B44: pool of 32 tokens, context of 100.
    engine = Engine(num_blocks=8, max_model_len=100)
    with pytest.raises(DoesNotFit, match=r"60 tokens .* KV cache of 32") as refused:
        engine.add("prompt", range(50), 10)
    assert refused.value.code == "does_not_fit"
    with pytest.raises(DoesNotFit, match="KV cache"):
        engine.add("output", range(10), 23)
    with pytest.raises(DoesNotFit, match="context length of 100"):
        engine.add("context", range(10), 95)
    with pytest.raises(DoesNotFit):
        engine.add("half", range(32), 4, send_to=SEND)
    engine.add("behind", range(10), 22)
    engine.run()
    assert engine.tokens["behind"] == oracle(range(10), 22)
    engine.check_empty()


def test_a_half_that_hands_over_needs_room_for_one_token_only() -> None:
    engine = Engine(num_blocks=8, max_model_len=33)
    engine.add("half", range(31), 500, send_to=SEND)
    engine.run()
    assert engine.tokens["half"] == oracle(range(31), 1)
    assert engine.scheduler.usage().held == 8
    engine.scheduler.release_held("half")
    assert engine.scheduler.usage().held == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [VOCAB]}, "token id 1000"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": [1], "output_token_ids": [VOCAB]}, "output: token id"),
        ({"prompt": [1], "output_token_ids": [1, 2, 3, 4]}, "complete"),
        ({"prompt": [1], "send_to": SEND, "receive_from": RECEIVE}, "both"),
        ({"prompt": [1], "sampling": SamplingParams(stop_token_ids=(10**6,))}, "stop_token_ids"),
        ({"prompt": [1], "sampling": SamplingParams(logit_bias={-1: 5.0})}, "logit_bias"),
        ({"prompt": [1], "sampling": SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"prompt": [1], "sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"prompt": [1], "sampling": SamplingParams(top_k=1 << 63)}, "top_k"),
        ({"prompt": [1], "sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
    ],
)
def test_bad_requests_are_refused_by_name(fields: dict[str, object], message: str) -> None:
    engine = Engine()
    with pytest.raises(BadRequest, match=message) as refused:
        engine.add("bad", **fields)
    assert refused.value.code == "bad_request"
    assert not engine.scheduler.requests


def test_an_id_is_free_again_only_after_its_end() -> None:
    engine = Engine()
    engine.add("a", [1], 2)
    with pytest.raises(RequestRejected, match="id a"):
        engine.add("a", [2], 2)
    engine.run()
    engine.ends.clear()
    engine.add("a", [3], 2)
    engine.run()
    assert engine.tokens["a"] == oracle([3], 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_ends_by_end_id_stop_id_and_length(depth: int) -> None:
    tokens = oracle([1, 2, 3], 6)
    engine = Engine(end_token_ids=[tokens[2]], max_model_len=9, max_num_seqs=5, manual=True, depth=depth)
    engine.add("end", [1, 2, 3], 6)
    engine.add("ignored", [1, 2, 3], sampling=SamplingParams(max_tokens=6, ignore_eos=True))
    engine.add("stop", [1, 2, 3], sampling=SamplingParams(max_tokens=6, stop_token_ids=(tokens[1],)))
    engine.add("later", [1, 2, 3], sampling=SamplingParams(max_tokens=6, min_tokens=3))
    engine.add("first", [1, 2, 3], sampling=SamplingParams(max_tokens=6, stop_token_ids=(tokens[0],)), send_to=SEND)
    engine.run()
    assert engine.tokens["end"] == tokens[:3]
    assert engine.finished("end") == Finished(reason="stop", stop_token_id=tokens[2])
    assert engine.tokens["stop"] == tokens[:2]
    assert engine.finished("ignored") == engine.finished("later") == Finished(reason="length")
    assert engine.tokens["ignored"] == engine.tokens["later"] == tokens
    assert engine.finished("first").stop_token_id == tokens[0]
    assert engine.core.counters.generated_tokens == 3 + 2 + 6 + 6 + 1
    engine.check_empty()


def test_forced_prefix_is_not_sampled_again() -> None:
    tokens = oracle(range(6), 8)
    engine = Engine()
    engine.add("a", range(6), 8, output_token_ids=tokens[:5])
    engine.run()
    assert engine.tokens["a"] == tokens
    assert engine.core.counters.generated_tokens == 3


def test_abort_in_every_state_before_and_while_it_is_computed() -> None:
    # B60: also of one still queued, never scheduled, so without blocks; and of ids nobody knows.
    engine = Engine(max_num_seqs=1, manual=True)
    engine.add("running", range(5), 9)
    engine.add("queued", range(5), 9)
    engine.add("for kv", range(5), 9, receive_from=RECEIVE)
    engine.begin()
    for request_id in ("queued", "for kv", "nobody", "running", "running"):
        engine.abort(request_id)
    assert engine.scheduler.usage().in_use == 2
    assert engine.complete() == []
    engine.check_empty()
    engine.add("next", range(5), 3)
    engine.run()
    assert engine.tokens["next"] == oracle(range(5), 3)
    assert engine.core.counters.requests_aborted == 3


def test_blocks_of_an_aborted_request_are_not_handed_out_before_its_step_ends() -> None:
    engine = Engine(num_blocks=4, manual=True)
    engine.add("aborted", range(12), 4)
    engine.begin()
    engine.abort("aborted")
    engine.add("waits", range(100, 112), 4, receive_from=RECEIVE)
    assert engine.scheduler.reserve("waits") is None
    engine.complete()
    assert engine.scheduler.reserve("waits") == [0, 1, 2]
    engine.abort("waits")
    engine.check_empty()


def test_same_id_again_while_the_aborted_one_is_still_computed() -> None:
    engine = Engine(manual=True)
    engine.add("a", range(5), 4)
    engine.begin()
    engine.abort("a")
    engine.add("a", range(50, 60), 4)
    assert engine.complete() == []
    engine.run()
    assert engine.tokens["a"] == oracle(range(50, 60), 4)


def test_failed_step_fails_its_requests_and_no_others() -> None:
    engine = Engine(max_num_seqs=1, manual=True)
    engine.add("in step", range(5), 4)
    engine.add("waiting", range(9), 4)
    engine.begin()
    engine.executor.fail_next("out of memory")
    (result,) = engine.complete()
    assert result.finish == Failed(code="internal", message="FakeDeviceError: out of memory")
    engine.run()
    assert engine.tokens["waiting"] == oracle(range(9), 4)
    assert engine.scheduler.usage().in_use == 0
    assert engine.core.counters.requests_failed == 1


def test_step_that_failed_tells_the_runner_again_what_to_forget() -> None:
    engine = Engine(manual=True)
    engine.add("a", [1], 1)
    engine.run()
    engine.add("b", [2], 2)
    engine.begin()
    # It fails before the runner has read that "a" is over.
    assert engine.scheduler._steps[0].output.finished_req_ids == {"a"}
    engine.executor.fail_next("x")
    engine.complete()
    engine.add("a", [3], 1)
    engine.run()
    assert engine.tokens["a"] == oracle([3], 1)


def test_two_steps_at_a_time() -> None:
    engine = Engine(manual=True)
    engine.add("a", [1], 9)
    assert engine.begin()
    assert engine.begin()
    assert not engine.begin()
    assert engine.core.step_in_flight
    with pytest.raises(AssertionError, match="oldest"):
        engine.core.finish_step(engine._futures[1], 0.0)


def test_offline_step_waits_for_its_result_with_another_queued() -> None:
    engine = Engine()
    assert engine.core.step(engine.tick) == []
    engine.add("a", [1], 3)
    tokens = []
    for num_left in (2, 1, 0):
        (result,) = engine.core.step(engine.tick)
        tokens += result.new_token_ids
        assert engine.core.step_in_flight == (num_left > 0)
    assert tokens == oracle([1], 3)
    assert engine.core.step(engine.tick) == []


def test_logprobs_come_with_their_tokens() -> None:
    engine = Engine()
    engine.add("with", [1], sampling=SamplingParams(max_tokens=2, logprobs=0))
    engine.add("without", [1], 2)
    results = [result for _ in range(2) for result in engine.step()]
    for result in results:
        entries = result.logprobs
        if result.request.request_id == "without":
            assert entries is None
        else:
            assert entries is not None
            assert [entry.token_id for entry in entries] == result.new_token_ids


def test_counters_count_each_prompt_token_once() -> None:
    engine = Engine()
    engine.add("a", range(10), 3)
    engine.run()
    engine.add("b", range(10), 3)
    engine.run()
    counters = engine.core.counters
    assert counters.prompt_tokens_computed == 12
    assert counters.prompt_tokens_cached == 8
    assert counters.prompt_tokens_transferred == 0
    assert counters.generated_tokens == 6
    assert counters.requests_length == 2
    assert counters.as_dict()["steps"] == 6


def test_times_of_a_life_come_from_its_events() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", [1], 1)
    engine.add("b", range(3), 2)
    request = engine.scheduler.requests["b"]
    engine.run()
    assert list(request.events) == [
        RequestEvent.ARRIVED,
        RequestEvent.SCHEDULED,
        RequestEvent.FIRST_TOKEN,
        RequestEvent.FINISHED,
    ]
    proof = request.prefill_proof()
    assert proof.queue_s == request.queue_s == 3.0
    assert proof.prefill_s == 1.0
    assert (proof.cached_tokens, proof.computed_tokens) == (0, 3)
    assert request.admission_s == 0.0


def test_nothing_is_scheduled_behind_a_certain_end() -> None:
    engine = Engine(manual=True)
    engine.add("length", range(3), 2)
    engine.add("half", range(50, 53), 9, send_to=SEND)
    assert engine.begin()
    assert engine.begin()
    first, second = (step.output.num_scheduled_tokens for step in engine.scheduler._steps)
    assert first == {"length": 3, "half": 3}
    assert second == {"length": 1}
    engine.complete()
    assert not engine.begin()
    engine.complete()
    assert engine.finished("length") == Finished(reason="length")
    assert engine.scheduler.usage().held == 1
    engine.scheduler.release_held("half")
    assert engine.scheduler.usage().in_use == engine.scheduler.usage().held == 0


def test_context_length_is_a_certain_end() -> None:
    engine = Engine(manual=True, max_model_len=8)
    engine.add("a", range(6), sampling=SamplingParams(max_tokens=2, ignore_eos=True))
    assert engine.begin()
    assert engine.begin()
    assert not engine.begin()
    engine.run()
    assert engine.tokens["a"] == oracle(range(6), 2)
    assert engine.core.counters.steps == 2


def test_blocks_of_an_ended_request_are_free_when_the_step_queued_behind_has_retired() -> None:
    tokens = oracle(range(BLOCK), 2)
    engine = Engine(num_blocks=2, end_token_ids=tokens[:1], manual=True)
    engine.add("ends", range(BLOCK), 4)
    engine.begin()
    engine.begin()
    engine.complete()
    assert engine.finished("ends") == Finished(reason="stop", stop_token_id=tokens[0])
    engine.add("waits", range(100, 105), 2, receive_from=RECEIVE)
    assert engine.scheduler.usage().in_use == 2
    assert engine.scheduler.reserve("waits") is None
    assert engine.complete() == []
    assert engine.tokens["ends"] == tokens[:1]
    assert engine.core.counters.generated_tokens == 1
    assert engine.scheduler.usage().cached == 1
    assert engine.scheduler.reserve("waits") == [0, 1]
    engine.abort("waits")
    engine.check_empty()


def test_failed_step_takes_along_its_requests_in_the_step_behind_and_no_others() -> None:
    engine = Engine(manual=True, max_num_batched_tokens=8)
    engine.add("fails", range(8), 9)
    engine.begin()
    engine.add("behind", range(50, 57), 3)
    engine.begin()
    assert list(engine.scheduler._steps[1].output.num_scheduled_tokens.items()) == [("fails", 1), ("behind", 7)]
    engine.executor.fail_next("out of memory")
    (result,) = engine.complete()
    assert result.request.request_id == "fails"
    assert not engine.begin(), "a step behind one that is not run would not be run either"
    assert engine.scheduler.usage().in_use == 5
    assert engine.complete() == []
    assert engine.scheduler.usage().in_use == 2
    engine.run()
    assert engine.tokens["behind"] == oracle(range(50, 57), 3)
    assert engine.core.counters.requests_failed == 1
    assert engine.scheduler.usage().in_use == 0
