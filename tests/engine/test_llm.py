"""The offline API on a tiny random model, through the real worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pdserve_engine.errors import DoesNotFit, GenerationFailed, RequestRejected
from pdserve_engine.llm import LLM
from pdserve_protocol.sampling import SamplingParams
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve_engine.scheduler_output import ModelRunnerOutput

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
CHAT = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    options = {"dtype": "float32", "kv_cache_memory": 4 << 20, "max_num_batched_tokens": 16, "threads": 1}
    with LLM(str(folder), max_model_len=256, **options) as llm:
        yield llm


@pytest.mark.slow
def test_one_text_or_several_or_token_ids(llm: LLM) -> None:
    (one,) = llm.generate("Hello world", GREEDY, use_tqdm=False)
    assert one.prompt == "Hello world"
    assert one.prompt_token_ids == llm.tokenizer.encode("Hello world", add_special_tokens=True)
    assert len(one.token_ids) == 8
    assert one.finish_reason == "length"
    assert one.text == llm.tokenizer.decode(one.token_ids)
    assert one.logprobs is None
    assert one.ttft_s > 0
    several = llm.generate(["something else", "Hello world"], GREEDY, use_tqdm=False)
    assert several[1].token_ids == one.token_ids
    (by_ids,) = llm.generate([one.prompt_token_ids], GREEDY, use_tqdm=False)
    assert by_ids.token_ids == one.token_ids
    assert by_ids.prompt is None


@pytest.mark.slow
def test_chunks_cache_hits_and_neighbours_do_not_change_the_answer(llm: LLM) -> None:
    prompt = [5 + index * 7 % 400 for index in range(70)]
    (alone,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    again, *_ = llm.generate([prompt, prompt[:20], prompt[::-1]], GREEDY, use_tqdm=False)
    assert alone.num_cached_tokens == 0
    assert again.num_cached_tokens == 64
    assert again.token_ids == alone.token_ids


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=count, logprobs=2, seed=count, ignore_eos=True) for count in (1, 5)]
    short, long = llm.generate(["a", "a"], each, use_tqdm=False)
    assert (len(short.token_ids), len(long.token_ids)) == (1, 5)
    assert long.logprobs is not None
    assert [entry.token_id for entry in long.logprobs] == long.token_ids
    with pytest.raises(ValueError, match="zip"):
        llm.generate(["a", "b", "c"], each, use_tqdm=False)


def test_text_ends_before_the_token_that_ended_it(llm: LLM) -> None:
    (free,) = llm.generate("abc", GREEDY, use_tqdm=False)
    stop = next(t for t in free.token_ids[1:] if t not in llm.tokenizer.table.special_ids)
    index = free.token_ids.index(stop)
    stopping = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    (stopped,) = llm.generate("abc", stopping, use_tqdm=False)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: index + 1]
    assert stopped.text == llm.tokenizer.decode(free.token_ids[:index])


def test_chat_renders_the_template_once(llm: LLM) -> None:
    (one,) = llm.chat(CHAT, GREEDY, use_tqdm=False)
    assert one.prompt is not None
    assert "Hello there" in one.prompt
    assert one.prompt_token_ids == llm.tokenizer.encode(one.prompt, add_special_tokens=False)
    first, second = llm.chat([CHAT, CHAT], GREEDY, use_tqdm=False)
    assert first.token_ids == second.token_ids == one.token_ids


def test_defaults_draw_a_fresh_seed(llm: LLM) -> None:
    assert llm.default_sampling_params().seed != llm.default_sampling_params().seed
    assert llm.default_sampling_params(seed=7, max_tokens=3) == SamplingParams(seed=7, max_tokens=3)
    assert len(llm.generate(["a", "b"], use_tqdm=False)) == 2


def test_one_prompt_that_cannot_be_taken_stops_the_call_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(DoesNotFit, match="256"):
        llm.generate([[1, 2], [3] * 300], GREEDY, use_tqdm=False)
    with pytest.raises(RequestRejected):
        llm.generate([[1, 2], [10**6]], GREEDY, use_tqdm=False)
    assert not llm.core.scheduler.requests
    assert llm.core.scheduler.usage().in_use == 0


def test_failed_step_is_an_error_and_the_next_call_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scheduler_output: object) -> ModelRunnerOutput:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.executor.worker, "execute_model", fail)
        with pytest.raises(GenerationFailed, match="MemoryError: no room"):
            llm.generate("a", GREEDY, use_tqdm=False)
    assert llm.core.scheduler.usage().in_use == 0
    assert len(llm.generate("a", GREEDY, use_tqdm=False)[0].token_ids) == 8


def test_call_after_an_interrupted_one(llm: LLM) -> None:
    (before,) = llm.generate("after", GREEDY, use_tqdm=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.core, "finish_step", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("interrupted", GREEDY, use_tqdm=False)
    (after,) = llm.generate("after", GREEDY, use_tqdm=False)
    assert after.token_ids == before.token_ids
    assert llm.core.scheduler.usage().in_use == 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], GREEDY)
    shown = capsys.readouterr().err
    assert "Generating" in shown
    assert "3/3" in shown
    llm.generate("a", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
