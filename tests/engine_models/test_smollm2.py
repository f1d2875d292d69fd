"""The demo model in bfloat16: what it answers, and how close its logits are to those of transformers."""

from __future__ import annotations

import pytest
import torch
from pdserve_engine.weights import resolve_model
from support.driver import Driver, all_logits, make_worker
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEXT = CHAT.format("Explain how rainbows form, step by step, for a child of ten.") + (
    "Rainbows form when sunlight meets drops of rain. Light bends as it enters a drop, is reflected at its back, and "
    "bends again as it leaves. Each colour bends a little differently: red least, violet most. 東京は日本の首都."
)


@pytest.fixture(scope="module")
def folder():
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.slow
def test_knows_the_capital_of_japan(folder, tokenizer):
    driver = Driver(make_worker(folder, dtype="bfloat16"))
    sequence = driver.add(tokenizer.encode(CHAT.format("What is the capital of Japan?"), add_special_tokens=False).ids)
    output = driver.run(sequence, num_tokens=8)[0]
    assert tokenizer.decode(output) == "The capital of Japan is Tokyo."
    assert output[-1] in driver.worker.end_token_ids


@pytest.mark.slow
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_transformers(folder, tokenizer):
    """Teacher-forced log probabilities over a prompt of some 120 tokens, measured against transformers in float32.

    Mean and maximum of the absolute difference, over the tokens whose probability is above 1e-4 on the float32 side.
    """
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    exact, theirs = (reference(folder, dtype, token_ids) for dtype in (torch.float32, torch.bfloat16))
    matters = exact > -9.2
    ours = torch.log_softmax(all_logits(folder, "bfloat16", token_ids), -1)
    ours_in_float32 = torch.log_softmax(all_logits(folder, "float32", token_ids), -1)

    def difference(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
        values = (a - b)[matters].abs()
        return values.mean().item(), values.max().item()

    mean32, max32 = difference(ours_in_float32, exact)
    mean16, max16 = difference(ours, exact)
    theirs_mean16, _ = difference(theirs, exact)
    # Measured: float32 9e-6 and 7e-5; bfloat16 0.059 and 0.41, transformers' own bfloat16 0.069 and 0.88.
    assert mean32 < 1e-4
    assert max32 < 1e-3
    assert mean16 < 0.09
    assert max16 < 1.0
    assert mean16 < 1.2 * theirs_mean16
    assert (ours.argmax(-1) == exact.argmax(-1)).float().mean() > 0.95


@torch.inference_mode()
def reference(folder, dtype, token_ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float(), -1)
