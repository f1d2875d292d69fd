from __future__ import annotations

import math
import random as random_module
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from pdserve_engine.sampler import SamplerState, sample
from pdserve_engine.sampling_random import uniform
from pdserve_protocol.sampling import SamplingParams

VOCAB = 40
END = 2


def state(params: SamplingParams, prompt: list[int] = [5], output: list[int] = [], choice: int = 0) -> SamplerState:  # noqa: B006
    return SamplerState(params, [*prompt, *output], len(prompt), choice=choice, vocab_size=VOCAB, end_token_ids=[END])


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def one(row: torch.Tensor, sampler_state: SamplerState) -> int:
    return sample(row.view(1, -1), [sampler_state])[0].token_id


def naive_token(row: torch.Tensor, params: SamplingParams, position: int, choice: int = 0) -> int:
    """Temperature, filters and draw, written with lists."""
    values = row.tolist()
    largest = max(values)
    probs = {i: math.exp((x - largest) / params.temperature) for i, x in enumerate(values)}
    probs = {i: p for i, p in probs.items() if p >= params.min_p * (1 - 1e-12)}
    ranked = sorted(probs, key=lambda i: (-values[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, mass, kept = sum(probs[i] for i in ranked), 0.0, []
    for i in ranked:
        if mass >= params.top_p * total:
            break
        kept.append(i)
        mass += probs[i]
    target, passed = uniform(params.seed, choice, position) * mass, 0.0
    for i in sorted(kept):
        passed += probs[i]
        if passed > target:
            return i
    raise AssertionError("no token passes the target")


def test_greedy_takes_the_largest_and_the_smaller_id_of_equals():
    row = torch.zeros(VOCAB)
    row[[7, 30]] = 1.0
    assert one(row, state(SamplingParams(temperature=0.0))) == 7
    assert one(row, state(SamplingParams(temperature=0.0, logprobs=1))) == 7


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 17, 40, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(params=params_strategy, logits_seed=st.integers(0, 1000), position=st.integers(0, 30))
def test_draws_as_the_plain_definition_says(params, logits_seed, position):
    row = logits(logits_seed)[0]
    assert one(row, state(params, output=[3] * position)) == naive_token(row, params, position)


def test_ties_at_the_border_of_top_k_go_to_the_smaller_ids():
    params = SamplingParams(top_k=3)
    tokens = {one(torch.zeros(VOCAB), state(params, output=[9] * position)) for position in range(60)}
    assert tokens == {0, 1, 2}


@pytest.mark.slow
def test_frequencies_follow_the_probabilities():
    row = logits(3)[0]
    probabilities = torch.softmax(row.double(), 0)
    counts = torch.zeros(VOCAB)
    for seed in range(3000):
        counts[one(row, state(SamplingParams(seed=seed)))] += 1
    assert (counts / 3000 - probabilities).abs().max() < 0.03


def test_large_vocabularies_find_the_same_nucleus_in_parts():
    row = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 0.5
    for top_p in (0.01, 0.3, 0.9):
        params = SamplingParams(top_p=top_p, seed=11)
        sampler_state = SamplerState(params, [1], 1, choice=0, vocab_size=20_000, end_token_ids=[])
        assert one(row, sampler_state) == naive_token(row, params, 0)


def greedy_after(row: list[float], params: dict[str, object], prompt: list[int], output: list[int]) -> int:
    padded = torch.full((VOCAB,), -100.0)
    padded[10 : 10 + len(row)] = torch.tensor(row)
    return one(padded, state(SamplingParams(temperature=0.0, **params), prompt, output))


def test_presence_and_frequency_penalties_count_output_tokens_only():  # B100
    row = [2.0, 1.5]
    assert greedy_after(row, {"presence_penalty": 1.0}, prompt=[10] * 5, output=[]) == 10
    assert greedy_after(row, {"presence_penalty": 1.0}, prompt=[5], output=[10]) == 11
    assert greedy_after(row, {"presence_penalty": 0.4}, prompt=[5], output=[10] * 9) == 10
    assert greedy_after(row, {"frequency_penalty": 0.2}, prompt=[10] * 5, output=[10] * 2) == 10
    assert greedy_after(row, {"frequency_penalty": 0.2}, prompt=[5], output=[10] * 3) == 11
    assert greedy_after(row, {"frequency_penalty": -0.2}, prompt=[5], output=[11] * 3) == 11


def test_repetition_penalty_counts_prompt_and_output_and_minds_the_sign():
    assert greedy_after([2.0, 1.5], {"repetition_penalty": 2.0}, prompt=[10], output=[]) == 11
    assert greedy_after([2.0, 1.5], {"repetition_penalty": 2.0}, prompt=[5], output=[10]) == 11
    assert greedy_after([-1.0, -1.5], {"repetition_penalty": 2.0}, prompt=[10, 10], output=[]) == 11
    assert greedy_after([2.0, 1.5], {"repetition_penalty": 1.2}, prompt=[10, 10], output=[10]) == 10


def test_min_tokens_forbids_end_and_stop_ids_until_reached():  # B74
    row = torch.zeros(VOCAB)
    row[END], row[7], row[9] = 5.0, 4.0, 3.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    assert [one(row, state(params, output=[4] * count)) for count in range(4)] == [9, 9, END, END]


def test_min_tokens_leaves_the_end_id_alone_where_it_does_not_end():
    row = torch.zeros(VOCAB)
    row[END], row[7], row[9] = 4.0, 5.0, 3.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
    assert one(row, state(params)) == END


def test_logit_bias():
    row = torch.zeros(VOCAB)
    row[3] = 1.0
    assert one(row, state(SamplingParams(temperature=0.0, logit_bias={8: 2.0}))) == 8
    assert one(row, state(SamplingParams(temperature=0.0, logit_bias={3: -100.0, 30: 0.1}))) == 30


def test_ids_outside_the_vocabulary_touch_nothing():  # B64
    rows = logits(4, rows=2)
    odd = SamplingParams(
        temperature=0.0, min_tokens=5, stop_token_ids=(10**6, -1), logit_bias={999_999: 5.0, -3: 100.0}
    )
    plain = SamplingParams(temperature=0.0)
    before = rows.clone()
    sampled = sample(rows, [state(odd), state(plain)])
    allowed = before[0].clone()
    allowed[END] = -math.inf
    assert [s.token_id for s in sampled] == [int(allowed.argmax()), int(before[1].argmax())]
    assert torch.equal(rows, before)


def test_logprobs_are_of_the_raw_logits():  # B79
    row = logits(5)[0]
    params = SamplingParams(temperature=0.5, presence_penalty=1.0, logit_bias={4: 3.0}, logprobs=3, seed=9)
    sampled = sample(row.view(1, -1), [state(params, output=[1, 1])])[0]
    expected = torch.log_softmax(row.double(), 0)
    assert sampled.logprobs is not None
    assert sampled.logprobs.token_id == sampled.token_id
    assert sampled.logprobs.logprob == pytest.approx(expected[sampled.token_id].item())
    assert sampled.logprobs.rank == 1 + int((row > row[sampled.token_id]).sum())
    order = expected.argsort(descending=True)[:3].tolist()
    assert [token_id for token_id, _ in sampled.logprobs.top] == order
    assert [value for _, value in sampled.logprobs.top] == pytest.approx(expected[order].tolist())
    assert sample(row.view(1, -1), [state(SamplingParams(logprobs=0))])[0].logprobs.top == []
    assert sample(row.view(1, -1), [state(SamplingParams())])[0].logprobs is None


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_p=0.7, min_p=0.01, logprobs=2),
    SamplingParams(seed=3, top_k=5, temperature=1.7, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.2, min_tokens=4),
    SamplingParams(seed=5, logit_bias={1: 2.0}, frequency_penalty=0.4, stop_token_ids=(3,), min_tokens=12),
]


def test_a_row_does_not_depend_on_the_others():
    rows = logits(6, rows=len(MIXED))
    states = [state(params, output=[i, 3, 3], choice=i) for i, params in enumerate(MIXED)]
    together = sample(rows, states)
    for order in (range(len(MIXED)), [3, 0, 5, 1, 4, 2]):
        for first, second in pairwise(order):
            pair = sample(rows[[first, second]], [states[first], states[second]])
            assert pair == [together[first], together[second]]
    assert [sample(rows[[i]], [states[i]])[0] for i in range(len(MIXED))] == together


def model(token_ids: list[int]) -> torch.Tensor:
    """Logits that depend on all tokens, as a model's do."""
    generator = random_module.Random(str(token_ids))
    return torch.tensor([[generator.gauss(0, 2) for _ in range(VOCAB)]])


def generate(params: SamplingParams, token_ids: list[int], num_prompt_tokens: int, count: int) -> list[int]:
    """Continues ``token_ids`` with one state, as the model runner does."""
    token_ids = list(token_ids)
    sampler_state = state(params, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:], choice=3)
    for _ in range(count):
        token_id = sample(model(token_ids), [sampler_state])[0].token_id
        sampler_state.append(token_id)
        token_ids.append(token_id)
    return token_ids


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    params=st.sampled_from(MIXED),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    cut=st.integers(0, 15),
)
def test_a_request_resumed_from_its_tokens_goes_on_as_if_never_interrupted(params, prompt, cut):
    whole = generate(params, prompt, len(prompt), 15)
    resumed = generate(params, whole[: len(prompt) + cut], len(prompt), 15 - cut)
    assert resumed == whole


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-6])
def test_the_smallest_temperatures_are_greedy(temperature, filters):  # B64, B108
    logits = torch.tensor([[0.5, 3.0, -2.0, 2.9]])
    params = SamplingParams(temperature=temperature, seed=1, **filters)
    (sampled,) = sample(logits, [SamplerState(params, [0], 1, choice=0, vocab_size=4, end_token_ids=())])
    assert sampled.token_id == 1
