"""The course of `make gpu-check`, on the CPU; its kernels are tested in tests/kernels."""

from __future__ import annotations

import pytest
import torch
from pdserve_bench.errors import NodeFailed
from pdserve_bench.gpu_check import __main__ as gpu_check, whole
from pdserve_bench.gpu_check.model import QWEN3_0_6B
from pdserve_bench.gpu_check.nodes import running_node
from pdserve_bench.gpu_check.pair import PairResult


def test_without_a_cuda_device_it_says_so_and_nothing_more(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 3
    assert capsys.readouterr().out == "torch sees no CUDA device: nothing was checked\n"


def test_what_is_missing_is_named(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "NEEDED", ("torch", "no_such_package"))
    assert gpu_check.main(["--device", "cpu"]) == 4
    assert "no_such_package not installed" in capsys.readouterr().out


def test_bytes_of_the_model():
    """Qwen3-0.6B: 0.6e9 parameters with the embedding, 28 layers of 8 KV heads."""
    assert QWEN3_0_6B.weight_bytes == pytest.approx(2 * 0.596e9, rel=0.01)
    assert QWEN3_0_6B.kv_bytes_per_token == 28 * 2 * 8 * 128 * 2


@pytest.mark.slow
def test_the_whole_course_on_the_cpu(capsys):
    assert gpu_check.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "KV over nixl, exact: True" in out
    assert "all that was checked is right" in out


@pytest.mark.parametrize(("unlike", "recomputed", "problems"), [([], 0, 0), ([70], 0, 1), ([5, 70], 16, 3)])
def test_what_counts_as_wrong(tmp_path, monkeypatch, unlike, recomputed, problems):
    result = PairResult(
        transport="nixl",
        exact=True,
        unlike=unlike,
        unlike_together=1,
        moved_bytes=100,
        transfer_s=0.1,
        landing_s=0.1,
        recomputed_tokens=recomputed,
        tokens_per_s=1.0,
    )
    monkeypatch.setattr(whole, "run_pair", lambda config: result)
    assert len(whole.check_pair(tmp_path, "cpu", whole.DRY)) == problems


@pytest.mark.slow
def test_a_node_that_does_not_start_is_told_with_its_log(tmp_path):
    with pytest.raises(NodeFailed, match="no model"), running_node("prefill", tmp_path, ["--model", "/nowhere"]):
        pass
