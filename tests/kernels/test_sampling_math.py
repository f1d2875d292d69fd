"""The mathematics of sampling in numpy and in C: alike, and as the definition says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from pdserve_kernels import cpu, sampling as in_numpy


def implementations():
    yield pytest.param(in_numpy, id="numpy")
    if cpu.is_built():
        from pdserve_kernels.cpu import sampling as in_c

        yield pytest.param(in_c, id="c")


pytestmark = pytest.mark.parametrize("math_", list(implementations()))


def row(vocab: int, seed: int, spread: float) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)
    return np.round(values, 1) if seed % 2 else values  # rounded ones have ties


def naive_draw(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, random: float) -> int:
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]
    weights = [w if w >= min_p * (1 - 1e-12) else 0.0 for w in weights]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    total, mass, kept = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    passed = 0.0
    for i in sorted(kept):
        passed += weights[i]
        if passed > random * mass:
            return i
    return max(i for i in kept if weights[i] > 0)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    vocab=st.sampled_from([1, 2, 17, 256, 1000, 3001]),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0, 60.0]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 999, 5000]),
    top_p=st.sampled_from([0.001, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    random=st.floats(0, 1, exclude_max=True),
)
def test_draw(math_, vocab, seed, spread, temperature, top_k, top_p, min_p, random):
    logits = row(vocab, seed, spread)
    found = math_.draw(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, random=random)
    assert found == naive_draw(logits.tolist(), temperature, top_k, top_p, min_p, random)


@pytest.mark.parametrize("vocab", [1, 15, 300, 49152])
def test_argmax_takes_the_first_of_the_largest(math_, vocab):
    rows = np.stack([row(vocab, seed, 1.0) for seed in range(4)])
    rows[3] = -5.0
    assert math_.argmax(torch.from_numpy(rows)) == rows.argmax(1).tolist()
    rows[0, vocab // 2 :] = 9.0
    assert math_.argmax(torch.from_numpy(rows))[0] == vocab // 2
    assert math_.argmax(torch.empty(0, vocab)) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_log_probability_and_first_tokens(math_, seed):
    logits = row(1003, seed, 3.0)
    wide = logits.astype(np.float64)
    total = math.log(sum(math.exp(x) for x in wide))
    for token_id in (0, 500, 1002, int(logits.argmax())):
        logprob, log_total, rank = math_.log_probability(logits, token_id)
        assert logprob == pytest.approx(wide[token_id] - total, abs=1e-12)
        assert log_total == pytest.approx(total, abs=1e-12)
        assert rank == 1 + int((logits > logits[token_id]).sum())
    order = sorted(range(1003), key=lambda i: (-logits[i], i))
    assert math_.first_tokens(logits, 20) == order[:20]
    assert math_.first_tokens(logits, 2000) == order
    assert math_.first_tokens(logits, 0) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_numbers_yield_a_token(math_, value):
    logits = np.full(600, value, dtype=np.float32)
    assert math_.draw(logits, temperature=1.0, top_k=5, top_p=0.9, min_p=0.0, random=0.5) == 0
    assert 0 <= math_.argmax(torch.from_numpy(logits).view(2, 300))[0] < 300


def test_forbidden_tokens_are_never_drawn(math_):
    logits = np.zeros(40, dtype=np.float32)
    logits[[0, 7, 39]] = -math.inf
    drawn = {math_.draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, random=i / 400) for i in range(400)} | {
        math_.draw(logits, temperature=1.0, top_k=39, top_p=0.9999, min_p=0.0, random=1 - 2**-53)
    }
    assert drawn == set(range(40)) - {0, 7, 39}
