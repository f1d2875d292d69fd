"""A worker in bfloat16: tokens and log probabilities of a request, to the last bit, in any company and any chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from pdserve_kernels import cpu
from pdserve_protocol.sampling import SamplingParams
from support.driver import Driver, make_worker
from support.models import write_model

pytestmark = pytest.mark.skipif(not cpu.is_built(), reason="torch's results depend on the batch")

NUM_TOKENS = 12
PROMPTS = [[(i * i + 11 * seed) % 500 + 3 for i in range(length)] for seed, length in enumerate([1, 16, 33, 90, 130])]
SAMPLING = [
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0, seed=5, top_p=0.9, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.8, seed=7, top_k=20, logprobs=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=0),
]


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral"])
def driver_and_alone(request, tmp_path_factory):
    options = {"sliding_window": 40} if request.param == "mistral" else {}
    folder = write_model(tmp_path_factory.mktemp("model"), request.param, eos_token_id=None, **options)
    driver = Driver(make_worker(folder, dtype="bfloat16"))
    alone = []
    for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True):
        sequence = driver.add(prompt, sampling)
        driver.run(sequence, num_tokens=NUM_TOKENS)
        alone.append((sequence.output, sequence.logprobs))
    return driver, alone


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    order=st.permutations(range(len(PROMPTS))),
    chunks=st.lists(st.lists(st.sampled_from([1, 3, 16, 40, 63, 64, 65]), max_size=4), min_size=5, max_size=5),
    starts=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    resumed=st.integers(0, NUM_TOKENS - 1),
)
def test_a_request_is_the_same_in_any_company(driver_and_alone, order, chunks, starts, resumed):
    driver, alone = driver_and_alone
    sequences = {}
    for index in order:
        sequences[index] = driver.add(PROMPTS[index], SAMPLING[index], chunks=chunks[index])
    # One of them has been here before: it comes with its output so far, and is computed anew.
    again = driver.add(PROMPTS[order[0]], SAMPLING[order[0]], output=alone[order[0]][0][:resumed])
    sequences[len(PROMPTS)] = again
    starts = [*starts, 2]
    step = 0
    while unfinished := [i for i, s in sequences.items() if len(s.output) < NUM_TOKENS]:
        driver.step(*[sequences[i] for i in unfinished if starts[i] <= step])
        step += 1
    for sequence in sequences.values():
        driver.finish(sequence)
    assert again.output == alone[order[0]][0]
    assert again.logprobs == alone[order[0]][1][resumed:]
    for index in order:
        assert (sequences[index].output, sequences[index].logprobs) == alone[index]
