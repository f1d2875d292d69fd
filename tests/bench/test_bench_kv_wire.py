"""The benchmarks of landing and of lossy wires: small, and what they must find."""

from __future__ import annotations

import pytest
from pdserve_bench import kv_landing, kv_wire
from pdserve_engine.weights import resolve_model
from pdserve_kernels.kv_blocks import Number
from pdserve_protocol.node import KVLayout

LAYOUT = KVLayout(block_size=4, num_layers=2, num_kv_heads=2, head_dim=16, dtype="bfloat16", block_bytes=1024)


def test_every_wire_packs_and_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_landing, "MEMORY_BYTES", 8 * LAYOUT.block_bytes)
    for name, wire in kv_landing.wires(LAYOUT).items():
        speed = kv_landing.pass_speed(name, wire, repetitions=1)
        assert min(speed.pack, speed.land, speed.memcpy) > 0
    assert {wire.number for wire in kv_landing.wires().values()} == {Number.BF16, Number.INT8, Number.FP8}


@pytest.mark.slow
def test_a_lossy_wire_changes_few_choices_of_the_demo_model() -> None:
    as_cached, int8 = kv_wire.agreement(
        resolve_model("smollm2"), ["bfloat16", "int8"], num_prompts=3, prompt_len=96, output_len=24
    )
    assert (as_cached.share, as_cached.bytes_ratio) == (1.0, 1.0)
    assert int8.bytes_ratio <= 0.55
    assert int8.share >= 0.95
