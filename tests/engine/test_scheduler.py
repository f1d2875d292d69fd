"""Order, preemption and the two halves of a hand-over."""

from __future__ import annotations

import random

import pytest
from pdserve_engine.prompt_share import LEAST
from pdserve_engine.request import RequestStatus
from pdserve_protocol.outputs import Finished
from support.engines import BLOCK, RECEIVE, SEND, Engine, oracle, transfer


def test_budget_goes_to_decodes_then_chunks_then_new_prompts() -> None:
    engine = Engine(max_num_batched_tokens=8, num_blocks=32)
    engine.add("decode", [1], 9)
    engine.step()
    engine.add("chunked", range(20), 2)
    engine.step()
    engine.add("new", [2, 3], 2)
    step = engine.scheduler.schedule(0.0)
    assert step is not None
    assert list(step.num_scheduled_tokens.items()) == [("decode", 1), ("chunked", 7)]
    assert step.total_num_scheduled_tokens == 8
    assert step.scheduled_cached_reqs.req_ids == ["decode", "chunked"]
    assert step.scheduled_new_reqs == []


def test_new_once_then_only_differences() -> None:
    engine = Engine()
    engine.add("a", range(BLOCK), 6)
    first = engine.scheduler.schedule(0.0)
    assert first is not None
    (new,) = first.scheduled_new_reqs
    assert (new.token_ids, new.num_prompt_tokens, len(new.block_ids)) == (list(range(BLOCK)), BLOCK, 2)
    engine.scheduler.update_from_output(first, engine.executor.execute_model(first).result(), 0.0)
    grown = []
    for _ in range(5):
        step = engine.scheduler.schedule(0.0)
        assert step is not None
        assert step.scheduled_new_reqs == []
        grown.append(len(step.scheduled_cached_reqs.new_block_ids[0]))
        engine.scheduler.update_from_output(step, engine.executor.execute_model(step).result(), 0.0)
    assert grown == [0, 0, 0, 0, 1]


def test_more_seqs_than_budget_are_not_admitted() -> None:
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=2)
    for index in range(4):
        engine.add(str(index), [index], 3)
    engine.step()
    assert engine.scheduler.num_running == 2
    assert engine.scheduler.num_waiting == 2
    engine.run()
    engine.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_last_admitted_is_preempted_and_resumes_with_the_same_tokens(depth: int) -> None:
    engine = Engine(num_blocks=6, manual=True, depth=depth)
    engine.add("old", range(8), 12)
    engine.add("young", range(50, 58), 12)
    young = engine.scheduler.requests["young"]
    engine.run()
    assert young.num_preemptions > 0
    assert engine.core.counters.preemptions == young.num_preemptions
    assert young.num_recomputed > 0
    assert engine.tokens["old"] == oracle(range(8), 12)
    assert engine.tokens["young"] == oracle(range(50, 58), 12)
    assert engine.core.counters.prompt_tokens_computed == 16
    engine.check_empty()


def test_lower_priorities_start_earlier_and_are_preempted_later() -> None:
    engine = Engine(num_blocks=6, max_num_seqs=2)
    engine.add("low", range(8), 12, priority=1)
    engine.add("first", range(50, 58), 12)
    engine.add("last", range(60, 63), 2)
    engine.add("urgent", range(70, 73), 2, priority=-5)
    step = engine.scheduler.schedule(0.0)
    assert step is not None
    assert list(step.num_scheduled_tokens) == ["urgent", "first"]
    engine = Engine(num_blocks=6)
    engine.add("low", range(8), 12, priority=1)
    engine.step()
    engine.add("urgent", range(50, 58), 12, priority=-5)
    low, urgent = (engine.scheduler.requests[name] for name in ("low", "urgent"))
    engine.run()
    assert low.num_preemptions > 0 == urgent.num_preemptions
    assert engine.tokens["low"] == oracle(range(8), 12)
    engine.check_empty()


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    engine = Engine(num_blocks=4, manual=True)
    engine.add("old", range(7), 8)
    engine.add("young", range(50, 57), 8)
    assert engine.begin()
    assert engine.begin()
    engine.complete()
    assert not engine.begin(), "the ninth token of each needs a block"
    assert engine.core.counters.preemptions == 0
    engine.complete()
    assert engine.begin()
    assert engine.core.counters.preemptions == 1
    engine.run()
    assert engine.tokens["old"] == oracle(range(7), 8)
    assert engine.tokens["young"] == oracle(range(50, 57), 8)


def test_preempted_request_whose_prefix_is_cached_resumes() -> None:
    # B71: free + cached + held = total after every request, and after a resume from the prefix cache.
    engine = Engine(num_blocks=6)
    engine.add("warm", range(8), 1)
    engine.run()
    engine.check_empty()
    engine.add("old", range(8), 12)
    engine.add("young", range(8), 12)
    young = engine.scheduler.requests["young"]
    resumed_from = set()
    while engine.scheduler.requests:
        engine.step()
        engine.check_blocks()
        if young.num_preemptions and young.status is RequestStatus.RUNNING:
            resumed_from.add(young.num_computed_tokens)
    assert young.num_preemptions > 0
    assert min(resumed_from) > 8
    assert engine.tokens["old"] == engine.tokens["young"] == oracle(range(8), 12)
    engine.check_empty()


def test_request_alone_preempts_itself_while_blocks_are_held_and_then_ends() -> None:
    engine = Engine(num_blocks=5)
    engine.add("held", range(7), 4, send_to=SEND)
    engine.step()
    engine.add("grows", range(30, 37), 12)
    engine.run()
    assert engine.scheduler.requests["grows"].status is RequestStatus.PREEMPTED
    assert engine.scheduler.has_schedulable()
    engine.scheduler.release_held("held")
    engine.run()
    assert engine.tokens["grows"] == oracle(range(30, 37), 12)


def test_half_that_hands_over_is_never_a_victim() -> None:
    engine = Engine(num_blocks=9, max_num_batched_tokens=8)
    engine.add("grows", range(7), 20)
    engine.step()
    engine.add("half", range(100, 124), 4, send_to=SEND)
    half = engine.scheduler.requests["half"]
    while half.status is not RequestStatus.HELD:
        assert engine.step()
    assert half.num_preemptions == 0
    engine.scheduler.release_held("half")
    engine.run()
    assert engine.tokens["grows"] == oracle(range(7), 20)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK - 1])
@pytest.mark.parametrize("warm", [0, 1, 2, 99])
def test_hand_over(length: int, warm: int) -> None:
    """The receiver caches nothing, some blocks or all full blocks of the prompt (B04: matched by index)."""
    prompt = list(range(length))
    sender, receiver = Engine(max_num_batched_tokens=8), Engine()
    if warm * BLOCK <= length or warm == 99:
        receiver.add("warm", prompt[: max(1, min(length, warm * BLOCK))], 1)
        receiver.run()
    receiver.add("r", prompt, 6, receive_from=RECEIVE)
    sender.add("r", prompt, 6, send_to=SEND)
    request = receiver.scheduler.requests["r"]
    needed = receiver.scheduler.reserve("r")
    assert needed is not None
    assert needed == list(range(request.num_cached_tokens // BLOCK, -(-length // BLOCK)))
    sender.run()
    assert sender.scheduler.requests["r"].status is RequestStatus.HELD
    assert sender.tokens["r"] == oracle(prompt, 1)
    transfer(sender, receiver, "r", needed)
    assert receiver.scheduler.kv_arrived("r", sender.tokens["r"], length, receiver.tick()) is None
    receiver.tokens["r"] = list(sender.tokens["r"])
    assert sender.scheduler.release_held("r") is not None
    assert sender.scheduler.release_held("r") is None
    sender.ends["r"].append("handed over")
    receiver.run()
    assert receiver.tokens["r"] == oracle(prompt, 6)
    assert request.num_recomputed == 0
    assert request.admission_s == 1.0
    assert sender.core.counters.requests_handed_over == 1
    counters = receiver.core.counters
    sources = (counters.prompt_tokens_cached, counters.prompt_tokens_transferred, counters.prompt_tokens_computed)
    assert sum(sources) == length + (min(length, max(1, warm * BLOCK)) if "warm" in receiver.tokens else 0)
    assert counters.prompt_tokens_transferred == length - request.num_cached_tokens
    sender.check_empty()
    receiver.check_empty()


@pytest.mark.parametrize("num_computed", [0, 5, 8, 19])
def test_hole_in_what_arrived_is_recomputed_and_counted(num_computed: int) -> None:
    prompt = list(range(20))
    receiver = Engine(max_num_batched_tokens=6)
    receiver.add("warm", prompt[:BLOCK], 1)
    receiver.run()
    receiver.add("r", prompt, 5, receive_from=RECEIVE)
    request = receiver.scheduler.requests["r"]
    assert receiver.scheduler.reserve("r") == [1, 2, 3, 4]
    sender = Engine(num_blocks=20)
    sender.add("r", prompt, 5, send_to=SEND)
    sender.run()
    transfer(sender, receiver, "r", range(1, num_computed // BLOCK + 1))
    receiver.scheduler.kv_arrived("r", oracle(prompt, 1), num_computed, receiver.tick())
    receiver.tokens["r"] = oracle(prompt, 1)
    receiver.run()
    assert receiver.tokens["r"] == oracle(prompt, 5)
    assert request.num_recomputed == 20 - max(num_computed, BLOCK)
    receiver.check_empty()


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK + 1])
def test_receiver_goes_on_alone_when_nothing_comes(reserved: bool, length: int) -> None:
    """The whole prompt may even be cached: its blocks are shared and must not be written to."""
    prompt = list(range(length))
    receiver = Engine()
    receiver.add("warm", prompt, 1)
    receiver.run()
    receiver.add("r", prompt, 5, receive_from=RECEIVE)
    if reserved:
        receiver.scheduler.reserve("r")
    receiver.scheduler.kv_arrived("r", [], length if reserved and length == BLOCK else 0, receiver.tick())
    receiver.run()
    assert receiver.tokens["r"] == oracle(prompt, 5)
    receiver.check_empty()


def test_reservation_is_all_or_nothing_and_waits_for_room() -> None:
    receiver = Engine(num_blocks=4)
    receiver.add("busy", range(5), 4)
    receiver.step()
    receiver.add("r", range(100, 111), 4, receive_from=RECEIVE)
    assert receiver.scheduler.reserve("r") is None
    assert receiver.scheduler.usage().in_use == 2
    assert receiver.scheduler.num_waiting_for_kv == 1
    receiver.run()
    assert receiver.scheduler.reserve("r") == [0, 1, 2]
    receiver.abort("r")
    receiver.check_empty()


def test_hand_overs_go_before_preempted_and_new_requests() -> None:
    receiver = Engine(max_num_seqs=1, num_blocks=20)
    receiver.add("running", range(4), 3)
    receiver.step()
    receiver.add("new", range(50, 54), 3)
    receiver.add("r", range(100, 104), 3, receive_from=RECEIVE)
    receiver.scheduler.reserve("r")
    receiver.scheduler.kv_arrived("r", oracle(range(100, 104), 1), 0, receiver.tick())
    receiver.tokens["r"] = oracle(range(100, 104), 1)
    order = []
    while receiver.scheduler.requests:
        order += [result.request.request_id for result in receiver.step() if result.finish]
    assert order == ["running", "r", "new"]


@pytest.mark.parametrize("reserved", [False, True])
def test_given_output_that_already_ends_is_an_end(reserved: bool) -> None:
    first = oracle([1, 2], 1)
    receiver = Engine(end_token_ids=first)
    receiver.add("r", [1, 2], 5, receive_from=RECEIVE)
    if reserved:
        receiver.scheduler.reserve("r")
    result = receiver.scheduler.kv_arrived("r", first, 2 if reserved else 0, receiver.tick())
    assert result is not None
    assert result.finish == Finished(reason="stop", stop_token_id=first[0])
    assert result.new_token_ids == first
    receiver.note(result)
    receiver.check_empty()
    assert receiver.scheduler.kv_arrived("r", first, 2, receiver.tick()) is None


def test_reset_of_the_prefix_cache_says_what_is_left() -> None:
    engine = Engine()
    engine.add("done", range(8), 1)
    engine.run()
    engine.add("held", range(50, 58), 4, send_to=SEND)
    engine.run()
    assert engine.scheduler.reset_prefix_cache() == (2, 2)
    engine.scheduler.release_held("held")
    assert engine.scheduler.reset_prefix_cache() == (2, 0)
    assert engine.scheduler.usage().free == 16


@pytest.mark.parametrize("depth", [1, 2])
def test_round_after_round_gives_the_same(depth: int) -> None:
    # B16: fixed prompts, mixed lengths, aborts and a pool that is too small; the last round equals the first.
    engine = Engine(num_blocks=10, max_num_seqs=3, max_num_batched_tokens=12, manual=True)
    prompts = [list(range(start, start + length)) for start, length in [(0, 3), (0, 9), (0, 17), (40, 8), (70, 21)]]
    draw = random.Random(0)
    for number in range(40):
        for index, prompt in enumerate(prompts):
            engine.add(f"{number}.{index}", prompt, 12)
            engine.add(f"{number}.{index}.dropped", prompt[::-1], 12)
        dropped = [f"{number}.{index}.dropped" for index in range(len(prompts))]
        for _ in range(500):
            while engine.num_in_flight < depth and engine.begin():
                pass
            if not engine.num_in_flight:
                break
            if dropped and draw.random() < 0.3:
                engine.abort(dropped.pop(draw.randrange(len(dropped))))
            engine.complete()
        for index, prompt in enumerate(prompts):
            assert engine.tokens[f"{number}.{index}"] == oracle(prompt, 12)
        engine.check_empty()
    assert engine.core.counters.preemptions > 0
    assert engine.core.counters.requests_aborted > 0


def a_block_beside_decodes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What prompts get there from now on."""
    monkeypatch.setattr(
        engine.scheduler.prompt_share, "num_tokens", lambda num_decodes, budget: BLOCK if num_decodes else budget
    )


def test_prompts_beside_decodes_are_cut_to_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(num_blocks=200, max_num_batched_tokens=64)
    a_block_beside_decodes(engine, monkeypatch)
    engine.add("alone", range(100), 20)
    engine.step()
    assert engine.scheduler.requests["alone"].num_computed_tokens == 64, "nobody waits for this step"
    engine.step()
    engine.add("long", range(300, 364), 2)
    engine.add("next", range(400, 404), 2)
    shares = []
    for _ in range(5):
        engine.begin()
        (step,) = engine.scheduler._steps
        shares.append(step.output.num_scheduled_tokens)
        engine.complete()
    assert shares == [{"alone": 1, "long": BLOCK}] * 5
    engine.run()
    assert engine.tokens == {
        "alone": oracle(range(100), 20),
        "long": oracle(range(300, 364), 2),
        "next": oracle(range(400, 404), 2),
    }
    engine.check_empty()


def test_kv_without_a_hole_does_not_wait_behind_kv_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Engine(num_blocks=64, max_num_batched_tokens=64)
    receiver = Engine(num_blocks=64, max_num_batched_tokens=64, max_num_seqs=8)
    a_block_beside_decodes(receiver, monkeypatch)
    for name, start in (("first", 100), ("second", 200), ("whole", 300)):
        prompt = range(start, start + 5 * BLOCK)
        sender.add(name, prompt, 4, send_to=SEND)
        receiver.add(name, prompt, 4, receive_from=RECEIVE)
        sender.run()
        needed = receiver.scheduler.reserve(name)
        assert needed is not None
        transfer(sender, receiver, name, needed)
        held = sender.scheduler.requests[name]
        num_good = 5 * BLOCK if name == "whole" else BLOCK
        receiver.scheduler.kv_arrived(name, held.output_token_ids, num_good, 0.0)
        receiver.tokens[name] += held.output_token_ids
    receiver.begin()
    (step,) = receiver.scheduler._steps
    assert step.output.num_scheduled_tokens == {"first": BLOCK, "whole": 1}
    receiver.complete()
    receiver.run()
    receiver.check_empty()


def test_a_prompt_leaves_room_for_streams_whose_kv_is_on_its_way() -> None:
    engine = Engine(num_blocks=64, max_num_batched_tokens=64, itl_target_s=0.001)
    engine.add("prompt", range(100), 2)
    engine.add("stream", range(200, 208), 2, receive_from=RECEIVE)

    def next_share() -> int:
        engine.begin()
        (step,) = engine.scheduler._steps
        engine.complete()
        return step.output.num_scheduled_tokens["prompt"]

    assert next_share() == 64, "nothing is reserved for the stream: it will take a while"
    assert engine.scheduler.reserve("stream") is not None
    assert next_share() == 32
    engine.abort("stream")
    engine.run()
    engine.check_empty()


def test_a_preempted_stream_does_not_wait_for_a_prompt_that_is_being_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(num_blocks=200, max_num_batched_tokens=64, prefix_caching=False)
    a_block_beside_decodes(engine, monkeypatch)
    engine.add("other", range(8), 100)
    engine.add("stream", range(50, 58), 20)
    engine.step()
    engine.step()
    engine.add("prompt", range(300, 300 + 50 * BLOCK), 2)
    engine.step()
    stream, prompt = engine.scheduler.requests["stream"], engine.scheduler.requests["prompt"]
    assert prompt.num_computed_tokens > 0
    engine.scheduler._preempt(stream)
    num_before = stream.num_output_tokens
    for _ in range(2 + stream.num_tokens // BLOCK):
        engine.step()
    assert stream.num_output_tokens > num_before
    assert prompt.num_remaining > 40 * BLOCK
    engine.run()
    assert engine.tokens["stream"] == oracle(range(50, 58), 20)
    assert engine.tokens["prompt"] == oracle(range(300, 300 + 50 * BLOCK), 2)
    engine.check_empty()


def test_the_rate_at_which_prompts_get_on_beside_decodes() -> None:
    engine = Engine(num_blocks=200, max_num_batched_tokens=100, itl_target_s=0.05)
    assert engine.scheduler.prompt_tokens_per_s == 0.0
    for _ in range(40):
        for num_decodes, num_tokens in ((0, 100), (3, 0), (1, 30)):
            seconds = 0.01 + num_decodes * 0.002 + num_tokens * 0.0005
            engine.scheduler.prompt_share.observe(num_decodes, num_tokens, seconds)
    assert engine.scheduler.prompt_tokens_per_s == pytest.approx(LEAST / (1 + LEAST) / 0.0005, rel=0.01)
