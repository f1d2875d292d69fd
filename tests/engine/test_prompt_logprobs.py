"""Log probabilities of prompts: each position once and in order, whatever chunks, caches and preemptions do."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from pdserve_engine.config import max_logits_rows
from pdserve_engine.errors import BadRequest
from pdserve_protocol.sampling import SamplingParams
from support.engines import BLOCK, RECEIVE, SEND, Engine, oracle, transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_engine.scheduler import StepResult


class Scored(Engine):
    """An engine whose requests are scored; notes which prompt tokens each was told of."""

    def __init__(self, **options: int | bool) -> None:
        self.reported: defaultdict[str, list[int]] = defaultdict(list)
        super().__init__(**options)  # type: ignore[arg-type]

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=0)
        super().add(request_id, prompt, sampling=sampling, **fields)

    def note(self, result: StepResult) -> None:
        super().note(result)
        if result.prompt_logprobs is not None:
            reported = self.reported[result.request.request_id]
            assert result.prompt_logprobs.position == len(reported) + 1
            prompt = result.request.prompt_token_ids
            for token in result.prompt_logprobs.tokens:
                # The fake device says the position as rank.
                assert token.token_id == prompt[token.rank]
                reported.append(token.rank)

    def check_reported(self, request_id: str, num_prompt_tokens: int) -> None:
        assert self.reported[request_id] == list(range(1, num_prompt_tokens))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_every_position_but_the_first(length: int, depth: int) -> None:
    engine = Scored(manual=True, depth=depth)
    engine.add("a", range(100, 100 + length))
    engine.run()
    engine.check_reported("a", length)
    assert engine.tokens["a"] == oracle(range(100, 100 + length), 4)
    engine.check_empty()


def test_a_cached_prompt_is_computed_again() -> None:
    engine = Scored()
    for request_id in ("first", "second"):
        engine.add(request_id, range(10))
        engine.run()
        engine.check_reported(request_id, 10)
    assert engine.core.counters.prompt_tokens_cached == 0
    # One that does not ask has the cache.
    Engine.add(engine, "third", range(10))
    engine.run()
    assert engine.core.counters.prompt_tokens_cached == 2 * BLOCK
    assert "third" not in engine.reported
    engine.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests_report_no_position_twice(depth: int) -> None:
    engine = Scored(num_blocks=9, manual=True, depth=depth)
    for number in range(3):
        engine.add(f"r{number}", range(number, number + 9), 12)
    engine.run()
    assert engine.core.counters.preemptions > 0
    for number in range(3):
        engine.check_reported(f"r{number}", 9)
        assert engine.tokens[f"r{number}"] == oracle(range(number, number + 9), 12)
    engine.check_empty()


def test_preempted_within_its_prompt() -> None:
    engine = Scored(num_blocks=8, max_num_batched_tokens=8)
    Engine.add(engine, "first", [1, 2, 3], 20)
    engine.step()
    engine.add("scored", range(26), 2)
    request = engine.scheduler.requests["scored"]
    engine.step()
    engine.step()
    assert request.num_preemptions == 1
    assert 0 < len(engine.reported["scored"]) < 25
    engine.run()
    engine.check_reported("scored", 26)
    engine.check_empty()


def test_rows_of_logits_are_bounded() -> None:
    engine = Scored(num_blocks=300, max_num_batched_tokens=500, max_num_seqs=4)
    rows = max_logits_rows(4)
    Engine.add(engine, "decodes", [1], 20)
    engine.step()
    engine.add("one", range(2 * rows + 7), 2)
    engine.add("two", range(rows), 2)
    Engine.add(engine, "plain", range(300, 640), 2)
    while engine.begin():
        step = engine.scheduler._steps[-1].output
        scored = sum(count for id, count in step.num_scheduled_tokens.items() if id in ("one", "two"))
        assert scored + len(step.num_scheduled_tokens.keys() & {"decodes", "plain"}) <= rows
        assert step.num_scheduled_tokens["decodes"] == 1 or "decodes" not in engine.scheduler.requests
        engine.complete()
        if "decodes" not in engine.scheduler.requests:
            break
    engine.run()
    engine.check_reported("one", 2 * rows + 7)
    engine.check_reported("two", rows)
    engine.check_empty()


def test_the_half_that_computes_the_prompt_reports() -> None:
    prefill, decode = Scored(), Scored()
    prefill.add("a", range(10), send_to=SEND)
    decode.add("a", range(10), receive_from=RECEIVE)
    prefill.run()
    prefill.check_reported("a", 10)
    needed = decode.scheduler.reserve("a")
    assert needed is not None
    transfer(prefill, decode, "a", needed)
    decode.scheduler.kv_arrived("a", prefill.tokens["a"], 10, decode.tick())
    prefill.scheduler.release_held("a")
    decode.tokens["a"] = list(prefill.tokens["a"])
    decode.run()
    assert decode.tokens["a"] == oracle(range(10), 4)
    assert not decode.reported


@pytest.mark.parametrize("count", [-1, 1001])
def test_how_many_is_checked(count: int) -> None:
    with pytest.raises(BadRequest, match="prompt_logprobs"):
        Engine().add("a", [1], sampling=SamplingParams(prompt_logprobs=count))
