"""Log probabilities of prompt tokens against transformers, in chunks and beside other requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve_engine.wiring import build_engine
from pdserve_protocol.requests import AddRequest
from pdserve_protocol.sampling import SamplingParams
from support.models import write_model
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 83


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 256])
def test_values_are_those_of_transformers(tmp_path: Path, chunk: int) -> None:
    torch.set_num_threads(1)
    folder = write_model(tmp_path, "qwen3", eos_token_id=None)
    prompt = torch.randint(3, 512, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), dim=-1)
    config = EngineConfig(
        model=ModelConfig(path=folder, dtype="float32"),
        cache=CacheConfig(num_blocks=32),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk),
        num_threads=1,
    )
    core, _ = build_engine(config)
    scored = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=4)
    core.add_request(AddRequest(id="other", boot_id="", prompt_token_ids=prompt[:9], sampling=SamplingParams()), 0.0)
    core.add_request(AddRequest(id="scored", boot_id="", prompt_token_ids=prompt, sampling=scored), 0.0)
    entries = []
    while core.scheduler.requests:
        for result in core.step(time.monotonic):
            if result.prompt_logprobs is not None:
                assert result.request.request_id == "scored"
                assert result.prompt_logprobs.position == len(entries) + 1
                entries += result.prompt_logprobs.tokens
    core.close()
    assert [entry.token_id for entry in entries] == prompt[1:]
    for position, entry in enumerate(entries, start=1):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        top = row.topk(4)
        assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
