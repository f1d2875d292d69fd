"""Weights in 8 bits: who can compute with them, and how near they, and KV in 8 bits, are to bfloat16."""

from __future__ import annotations

import pytest
import torch
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig
from pdserve_engine.errors import NoKernels
from pdserve_engine.weights import resolve_model
from pdserve_engine.worker import Worker
from pdserve_kernels import cpu
from pdserve_kernels.errors import NoQuantization
from pdserve_kernels.select import select_backend
from pdserve_text.files import load_tokenizer_files
from pdserve_text.tokenizer import Tokenizer
from support.driver import all_logits
from support.models import tiny_model
from support.texts import ENGLISH


def worker(folder, dtype, backend):
    model = ModelConfig(path=folder, dtype=dtype, quantization="int8")
    return Worker(EngineConfig(model=model, cache=CacheConfig(num_blocks=2), num_threads=1), backend=backend)


@pytest.mark.parametrize(
    ("dtype", "backend", "reason"),
    [("float32", "auto", "bfloat16"), ("bfloat16", "torch", "C kernels"), ("bfloat16", "triton", "C kernels")],
)
def test_who_has_no_int8_says_so(tmp_path, dtype, backend, reason):
    if not cpu.is_built():
        reason = "C kernels"
    with pytest.raises(NoKernels, match=f"int8 .*{reason}"):
        worker(tiny_model(tmp_path / "tiny"), dtype, backend)
    with pytest.raises(NoQuantization, match="CPUs"):
        select_backend(device_type="cuda", dtype=torch.bfloat16, quantization="int8")


def test_without_the_c_kernels_there_is_no_int8(monkeypatch):
    monkeypatch.setattr("pdserve_kernels.cpu.is_built", lambda: False)
    with pytest.raises(NoQuantization, match="not installed"):
        select_backend(quantization="int8")


@pytest.mark.skipif(not cpu.is_built(), reason="the C kernels are not built")
def test_numerics_say_so(tmp_path):
    assert worker(tiny_model(tmp_path / "tiny"), "bfloat16", "auto").numerics.endswith("/bfloat16/int8")


@pytest.mark.slow
@pytest.mark.skipif(not cpu.is_built(), reason="the C kernels are not built")
def test_quality_on_the_demo_model():
    folder = resolve_model("smollm2")
    ids = Tokenizer.from_files(load_tokenizer_files(folder)).encode(ENGLISH, add_special_tokens=True)
    target = torch.tensor(ids[1:])

    def logits_and_loss(**what):
        logits = all_logits(folder, "bfloat16", ids, **what)
        return logits, torch.nn.functional.cross_entropy(logits[:-1], target).item()

    exact, loss = logits_and_loss()
    print(f"bfloat16: loss {loss:.4f} over {len(ids)} tokens")
    for what in ({"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}):
        logits, other = logits_and_loss(**what)
        agreement = (exact.argmax(-1) == logits.argmax(-1)).double().mean().item()
        print(f"{what}: the same next token for {agreement:.1%}, loss {other:.4f}")
        assert 0.9 < agreement < 1
        assert other - loss < 0.05
