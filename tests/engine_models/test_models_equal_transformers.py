"""Tiny models in float32 against transformers: greedy tokens through paged, chunked and batched steps, and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.driver import Driver, Sequence, all_logits, make_worker
from support.models import write_model
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 16
NUM_TOKENS = 64
MODELS = {
    "llama-tied": ("llama", {"tied": True}),
    "llama": ("llama", {"tied": False, "attention_bias": False}),
    "llama-mha-bias": ("llama", {"kv_heads": 4, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tied": False, "head_dim": 32}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
}
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 83]


def prompt(length: int) -> list[int]:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(length)).tolist()


class Case:
    """A model, and what transformers makes of each prompt."""

    def __init__(self, folder: Path, architecture: str, options: dict[str, object]) -> None:
        self.folder = write_model(folder, architecture, eos_token_id=None, **options)
        self.reference = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.driver = Driver(make_worker(self.folder, block_size=BLOCK))
        self.expected = {length: self.generate(prompt(length)) for length in LENGTHS}

    def generate(self, token_ids: list[int]) -> list[int]:
        output = self.reference.generate(torch.tensor([token_ids]), max_new_tokens=NUM_TOKENS, do_sample=False)
        return output[0, len(token_ids) :].tolist()


@pytest.fixture(scope="module", params=MODELS, ids=list(MODELS))
def case(request, tmp_path_factory):
    torch.set_num_threads(1)
    return Case(tmp_path_factory.mktemp(request.param), *MODELS[request.param])


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens(case, length):
    sequence = case.driver.add(prompt(length))
    assert case.driver.run(sequence, num_tokens=NUM_TOKENS) == [case.expected[length]]
    assert len(set(case.expected[length])) > 10, "output is too uniform to prove anything"


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[1, 2, 3, 50], [BLOCK] * 5, [BLOCK - 1, BLOCK + 1, 1], [82], [40, 40, 2]])
def test_chunks_of_a_prompt(case, chunks):  # B15
    sequence = case.driver.add(prompt(83), chunks=chunks)
    assert case.driver.run(sequence, num_tokens=NUM_TOKENS) == [case.expected[83]]


@pytest.mark.slow
def test_batch_of_mixed_lengths(case):
    chunks = {1: [], BLOCK - 1: [3], BLOCK: [], BLOCK + 1: [BLOCK], 83: [7, 20, 30]}
    sequences = [case.driver.add(prompt(length), chunks=chunks[length]) for length in LENGTHS]
    assert case.driver.run(*sequences, num_tokens=NUM_TOKENS) == [case.expected[length] for length in LENGTHS]


@pytest.mark.slow
def test_joining_and_leaving_a_running_batch(case):
    first, second = case.driver.add(prompt(83)), case.driver.add(prompt(BLOCK))
    third = case.driver.add(prompt(BLOCK + 1))
    for _ in range(5):
        case.driver.step(first)
    case.driver.step(first, second)
    case.driver.finish(first)
    assert case.driver.run(third, second, num_tokens=NUM_TOKENS) == [case.expected[BLOCK + 1], case.expected[BLOCK]]
    assert first.output == case.expected[83][:6]


@pytest.mark.slow
def test_resuming_from_tokens_with_and_without_their_kv(case):
    expected = case.expected[BLOCK + 1]
    recomputed = case.driver.add(prompt(BLOCK + 1), output=expected[:20])
    assert case.driver.run(recomputed, num_tokens=NUM_TOKENS) == [expected]
    # A second request in the blocks of the first, whose prompt it therefore need not compute.
    first = case.driver.add(prompt(BLOCK + 1))
    case.driver.step(first)
    second = Sequence("second", [*prompt(BLOCK + 1), expected[0]], first.sampling, BLOCK + 1)
    second.block_ids, second.num_computed_tokens = list(first.block_ids), BLOCK + 1
    assert case.driver.run(second, num_tokens=NUM_TOKENS) == [expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 8,
                "truncate": False,
                "attention_factor": 1.3,
            }
        },
        {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "linear", "factor": 2.0}},
    ],
    ids=["theta", "linear", "llama3", "yarn", "yarn-options", "rope_parameters"],
)
def test_logits_with_rope_scaling(tmp_path, rope):
    folder = write_model(tmp_path, "llama", head_dim=32, max_position_embeddings=256, **rope)
    token_ids = prompt(256)
    expected = reference_logits(folder, token_ids)
    difference = (all_logits(folder, "float32", token_ids) - expected).abs().max()
    assert difference < 2e-3, f"logits reach {expected.abs().max():.1f}"


@pytest.mark.slow
def test_logits_with_a_sliding_window(tmp_path):
    folder = write_model(tmp_path, "mistral", sliding_window=7)
    token_ids = prompt(50)
    ours = all_logits(folder, "float32", token_ids)
    assert (ours - reference_logits(folder, token_ids)).abs().max() < 1e-3
    unlimited = all_logits(write_model(tmp_path, "mistral", sliding_window=None), "float32", token_ids)
    assert (ours[:7] - unlimited[:7]).abs().max() < 1e-3
    assert (ours[7:] - unlimited[7:]).abs().max() > 1


@torch.inference_mode()
def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
