"""Weights in 8 bits: who can compute with them, and how near they are to bfloat16."""

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

TEXT = """The lighthouse keeper had counted ships for thirty years. Every evening he climbed the stairs, lit the lamp
and wrote down what passed: the name of the vessel if he could read it, its direction, the weather. Nobody had
ever asked for these notes. When the harbour was closed and the last ferry had gone, a young woman came from
the university and wanted to know how often fog had kept the fishing boats at home. He brought her the first
of forty books. It took them a whole winter to copy the figures into tables, and in spring they knew something
that no one had known before: the fog had moved. It came earlier each year, by about a day and a half, and it
stayed longer. Water in the bay had become warmer, she explained, and warm air over cold currents turns into
fog. The boats that once waited a week in March now waited two in February. In a computer program the same
question would take a few seconds. First, read the file line by line. Then split each line at the comma,
convert the second field to a number, and add it to the sum for its month. Finally, divide by the number of
years and print the result. The keeper looked at the curve on the screen for a long time."""


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
    ids = Tokenizer.from_files(load_tokenizer_files(folder)).encode(TEXT, add_special_tokens=True)
    exact, int8 = (all_logits(folder, "bfloat16", ids, quantization=q) for q in (None, "int8"))
    agreement = (exact.argmax(-1) == int8.argmax(-1)).double().mean().item()
    target = torch.tensor(ids[1:])
    losses = [torch.nn.functional.cross_entropy(x[:-1], target).item() for x in (exact, int8)]
    print(f"{len(ids)} tokens: the same next token for {agreement:.1%}, loss {losses[0]:.4f} and {losses[1]:.4f}")
    assert 0.9 < agreement < 1
    assert losses[1] - losses[0] < 0.05
