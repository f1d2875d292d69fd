"""``pdserve bench kernels`` on a tiny model, the costs that it divides by, and that timing changes no result."""

from __future__ import annotations

import json
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from pdserve_bench.kernels import floors, run
from pdserve_bench.kernels.config import KernelsBench, scenarios
from pdserve_bench.kernels.costs import Cost, attention_flops, step_cost
from pdserve_bench.kernels.driver import Driver
from pdserve_bench.kernels.measure import Samples, StepSamples
from pdserve_bench.kernels.results import result_of
from pdserve_bench.kernels.timed import OperationTime, TimedBackend
from pdserve_cli.main import main
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig
from pdserve_engine.models.config import read_config
from pdserve_engine.weights import load_weights
from pdserve_engine.worker import Worker
from pdserve_kernels.select import select_backend
from support.driver import Driver as StepDriver
from support.models import tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("bench") / "tiny")


def _bench(folder: Path, **fields: Any) -> KernelsBench:
    values: dict[str, Any] = {
        "model": str(folder),
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "backend": "torch",
        "baseline": None,
        "threads": 1,
        "batch_sizes": (1, 3),
        "context": 20,
        "prefill_lens": (40,),
        "repetitions": 2,
        "label": "",
        "json_path": None,
        "plot_path": None,
    }
    return KernelsBench(**values | fields)


@pytest.mark.slow
def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(run, "ReadBandwidth", lambda: floors.ReadBandwidth(1 << 20))
    monkeypatch.setattr(floors, "_MATRIX_SHAPES", ((64, 64, 64),))
    result, page, picture = tmp_path / "k.json", tmp_path / "k.html", tmp_path / "k.png"
    argv = ["bench", "kernels", "--model", str(folder), "--context", "24", "--batch-sizes", "1", "4"]
    argv += ["--prefill-lens", "64", "--repetitions", "2", "--json", str(result)]
    for plot in (page, picture):
        with pytest.raises(SystemExit) as exit:
            main([*argv, "--plot", str(plot)])
        assert exit.value.code == 0
    steps = json.loads(result.read_bytes())["result"]["steps"]
    found = [(step["backend"], step["scenario"]["kind"], step["scenario"]["num_tokens"]) for step in steps]
    wanted = [("decode", 1), ("decode", 4), ("prefill", 64)]
    assert found == [(backend, *step) for step in wanted for backend in ("auto", "torch")]
    for step in steps:
        assert step["ratio"] > 0
        assert step["outside_s"] > 0
        calls = {operation["name"]: operation["calls"] for operation in step["operations"]}
        assert calls == {
            **{"linear qkv": 2, "linear output": 2, "gated_linear gate_up": 2, "linear down": 2, "linear head": 1},
            **{"rms_norm": 5, "rope_and_write_kv": 2, "paged_attention": 2, "plan": 1},
        }
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "whole steps, decode at context 24" in page.read_text()
    assert "matrix peak, bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--backend", "abacus"], "abacus"),
        (["--repetitions", "0"], "--repetitions 0"),
        (["--batch-sizes", "0"], "--batch-sizes 0"),
        (["--batch-sizes", "--prefill-lens"], "at least one"),
        (["--prefill-lens", "5000"], "the model's context is 4096 tokens"),
    ],
)
def test_refusals(folder: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", "kernels", "--model", str(folder), "--batch-sizes", "1", *argv])
    assert exit.value.code == 2
    assert words in capsys.readouterr().err


def test_steps_have_the_context_that_was_asked_for(folder: Path) -> None:
    bench = _bench(folder)
    driver = Driver(bench, folder, "torch", 5, Random(0))
    lens: dict[str, list[int]] = {}
    for _ in range(5):
        for scenario in scenarios(bench):
            seconds, query_lens, seq_lens = driver.step(scenario)
            assert seconds > 0
            assert query_lens == ([40] if scenario.kind == "prefill" else [1] * scenario.num_tokens)
            lens.setdefault(scenario.name, []).extend(seq_lens)
    assert set(lens["prefill 40"]) == {40}
    for name in ("decode 1", "decode 3"):
        assert sum(lens[name]) / len(lens[name]) == pytest.approx(20, abs=2)


def test_a_cache_of_codes_counts_as_what_it_is(folder: Path) -> None:
    driver = Driver(_bench(folder, kv_cache_dtype="int8"), folder, "torch", 1, Random(0))
    assert driver.kv_itemsize == (16 + 4) / 16
    assert driver.worker.layout.dtype == "int8"
    costs = [step_cost(driver.model_config, 2, [1], [1000], kv) for kv in (None, driver.kv_itemsize)]
    assert costs[0].num_bytes - costs[1].num_bytes == 0.75 * 1000 * 2 * 2 * 2 * 16
    driver.step(scenarios(_bench(folder))[1])


@pytest.mark.parametrize("timed", [False, True])
def test_timing_changes_no_token(folder: Path, timed: bool) -> None:
    config = EngineConfig(
        model=ModelConfig(path=folder, dtype="float32"), cache=CacheConfig(num_blocks=8), num_threads=1
    )
    backend = TimedBackend(select_backend("torch"), read_config(folder), 4)
    drivers = [StepDriver(Worker(config)), StepDriver(Worker(config, backend=backend))]
    if timed:
        backend.start()
    expected, found = (driver.run(driver.add(list(range(3, 30))), num_tokens=5) for driver in drivers)
    assert found == expected
    assert bool(backend.times) == timed
    assert (backend.decoder_s > 0) == (not timed)


def test_the_weights_of_a_step_are_those_of_the_model(folder: Path) -> None:
    config = read_config(folder)
    weights = load_weights(folder, torch.bfloat16)
    num_bytes = sum(tensor.nbytes for name, tensor in weights.items() if tensor.dim() == 2)
    cost = step_cost(config, 2, [1], [1])
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    assert cost.num_bytes == num_bytes + kv
    assert cost.flops == num_bytes + 4 * config.num_layers * config.num_heads * config.head_dim


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=4))
def test_attention_counts_every_pair_once(requests: list[tuple[int, int]]) -> None:
    config: Any = SimpleNamespace(num_heads=3, head_dim=2, sliding_window=None)
    query_lens = [query_len for query_len, _ in requests]
    seq_lens = [query_len + before for query_len, before in requests]
    pairs = sum(position + 1 for query_len, before in requests for position in range(before, before + query_len))
    assert attention_flops(config, query_lens, seq_lens) == 4 * 3 * 2 * pairs


def test_the_floor_is_the_longer_of_memory_and_arithmetic() -> None:
    assert Cost(10.0, 100.0).floor_s(bandwidth=5.0, peak=100.0) == 2.0
    assert Cost(10.0, 400.0).floor_s(bandwidth=5.0, peak=100.0) == 4.0
    assert Cost(1.0, 2.0) + Cost(3.0, 4.0) == Cost(4.0, 6.0)


def test_ratios() -> None:
    [scenario] = scenarios(_bench(folder=None, batch_sizes=(1,), prefill_lens=()))  # type: ignore[arg-type]

    def steps(backend: str, *seconds: float) -> StepSamples:
        operation = OperationTime(calls=2, seconds=0.5, cost=Cost(1.0, 0.0))
        return StepSamples(
            scenario=scenario,
            backend=backend,
            seconds=list(seconds),
            costs=[Cost(10.0, 1.0)] * 3,
            # Each step has floors of its own, unlike those at the medians.
            floors_s=[1.0, 0.5, 2.0],
            memory_s=[2.0, 0.5, 0.5],
            operations=[{"linear": operation}] * 3,
            outside_s=[0.25] * 3,
        )

    samples = Samples(
        bandwidths=[5.0, 10.0, 20.0], peaks=[1.0] * 3, steps=[steps("c", 2, 3, 4), steps("torch", 6, 6, 9)]
    )
    ours, theirs = result_of(samples, "torch").steps
    assert (ours.memory_s, ours.matrix_s, ours.floor_s) == (1.0, 1.0, 1.0)
    assert (ours.ratio, ours.memory_ratio, ours.best_ratio) == (2.0, 6.0, 2.0)
    assert (theirs.ratio, theirs.memory_ratio) == (6.0, 12.0)
    assert (ours.speedup, theirs.speedup) == (2.0, None)
    assert ours.operations[0].ratio == 5.0
    assert ours.outside_s == 0.25
