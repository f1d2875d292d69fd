"""FlashAttnBackend over a stand-in with flash_attn's signatures and demands; its other kernels in the interpreter."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import replace

import pytest
import torch
from pdserve_kernels import flash_attn, triton_gpu
from pdserve_kernels.errors import NoFlashAttn
from pdserve_kernels.interface import AttentionMetadata, AttentionSpec
from pdserve_kernels.select import select_backend
from pdserve_kernels.torch_backend import TorchBackend
from support import fake_flash_attn

pytest.importorskip("triton")

from pdserve_kernels.flash_attn.backend import FlashAttnBackend

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 256


def spec(window: int | None) -> AttentionSpec:
    table_MD = torch.ones(1024, DIM // 2)
    return AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=0.3,
        sliding_window=window,
        cos_MD=table_MD,
        sin_MD=table_MD,
        norm_eps=1e-6,
    )


def metadata(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tables = torch.tensor([[3, 1], [5, 2], [0, 4]][: len(query_lens)], dtype=torch.int32)
    return AttentionMetadata(
        positions_T=torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)]).int(),
        slots_T=torch.full((sum(query_lens),), -1, dtype=torch.int32),
        query_start_R1=starts,
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables_RP=tables,
        query_lens=query_lens,
        seq_lens=seq_lens,
    )


def tensors(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q_THD = torch.randn(num_tokens, HEADS, DIM, generator=generator).bfloat16()
    return q_THD, torch.randn(6, KV_HEADS, 2, 2, BLOCK, DIM, generator=generator).bfloat16()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "expected_calls"),
    [
        ([1, 1, 1], [300, 7, 512], ["with_kvcache"]),
        ([20, 1, 3], [300, 7, 400], ["varlen"]),
        ([1, 1, 33], [300, 7, 400], ["with_kvcache", "varlen"]),
    ],
    ids=["decode", "chunks", "both"],
)
def test_attention_is_that_of_torch(monkeypatch, query_lens, seq_lens, expected_calls, window):
    monkeypatch.setattr(fake_flash_attn, "calls", [])
    q_THD, cache = tensors(sum(query_lens))
    outs = []
    for backend in (FlashAttnBackend(fake_flash_attn), TorchBackend()):
        plan = backend.plan(metadata(query_lens, seq_lens), spec(window), cache)
        outs.append(backend.paged_attention(q_THD, 1, plan))
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
    assert fake_flash_attn.calls == expected_calls
    assert fake_flash_attn.memory == cache.untyped_storage().data_ptr(), "the cache is used where it lies"


def test_rows_that_pad_a_batch_are_zero_and_write_nothing():
    q_THD, cache = tensors(3)
    before = cache.clone()
    padded = replace(metadata([1, 1, 1], [300, 1, 1]), seq_lens_R=torch.tensor([300, 0, 0], dtype=torch.int32))
    backend = FlashAttnBackend(fake_flash_attn)
    plan = backend.plan(padded, spec(None), cache)
    backend.rope_and_write_kv(torch.ones(3, 8 * DIM).bfloat16(), 1, plan)
    assert torch.equal(cache, before)
    assert not backend.paged_attention(q_THD, 1, plan)[1:].any()


@pytest.mark.parametrize(("block", "dtype"), [(16, torch.bfloat16), (256, torch.float32)])
def test_what_it_cannot_use_is_refused(block, dtype):
    cache = torch.zeros(6, KV_HEADS, 1, 2, block, DIM, dtype=dtype)
    with pytest.raises(NoFlashAttn, match=f"blocks of {block} tokens"):
        FlashAttnBackend(fake_flash_attn).plan(metadata([1], [5]), spec(None), cache)


@pytest.mark.skipif(flash_attn.is_installed(), reason="it is installed")
def test_without_the_package_it_says_so():
    with pytest.raises(NoFlashAttn, match="cannot be used"):
        FlashAttnBackend()


@pytest.mark.skipif(not flash_attn.is_installed(), reason="there is nothing to compare with")
@pytest.mark.parametrize("name", ["flash_attn_with_kvcache", "flash_attn_varlen_func"])
def test_the_stand_in_has_the_real_signature(name):
    module = importlib.import_module("flash_attn")
    used = inspect.signature(getattr(fake_flash_attn, name)).parameters
    real = inspect.signature(getattr(module, name)).parameters
    assert [*used] == [*real][: len(used)]


def test_its_fingerprint_names_both():
    assert FlashAttnBackend(fake_flash_attn).fingerprint(torch.bfloat16).startswith("flash_attn1/2.7.0/triton2/")


def test_it_is_chosen_where_it_is_installed_and_takes_the_blocks(monkeypatch):
    monkeypatch.setattr(flash_attn, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)

    def chosen(block_size: int, dtype: torch.dtype) -> str:
        return type(select_backend("auto", device_type="cuda", block_size=block_size, dtype=dtype)).__name__

    assert chosen(256, torch.bfloat16) == "FlashAttnBackend"
    assert chosen(16, torch.bfloat16) == chosen(256, torch.float32) == "TritonBackend"
    monkeypatch.setattr(triton_gpu, "is_installed", lambda: False)
    assert chosen(256, torch.bfloat16) == "TorchBackend"
