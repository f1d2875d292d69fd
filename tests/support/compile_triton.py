"""Compiles every Triton kernel to machine code of an NVIDIA GPU without one.

    python -m support.compile_triton 90 bfloat16

The launches are those of the backend on CPU tensors, with the compiler alone in the place of the GPU. Prints a line for
each kernel: its name and the bytes of its machine code. Triton must not be in its interpreter here.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import triton
from pdserve_kernels.interface import AttentionMetadata, AttentionSpec
from pdserve_kernels.quantized_cache import codes_of
from pdserve_kernels.triton_gpu import activation, attention, digest, landing, norm, rope
from triton.backends.compiler import GPUTarget

BLOCK = 16
SHAPES = {"bfloat16": (torch.bfloat16, 32, 8, 128, 100), "float32": (torch.float32, 9, 3, 64, None)}
"""Arguments of ``launch_all``."""


def compile_instead_of_launching(capability: int) -> None:
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda index: 0,
    )
    triton.runtime.driver.set_active(device)
    run = triton.JITFunction.run

    def compile_and_report(kernel, *args, grid, warmup, **options):
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        print(kernel.__name__, len(compiled.asm["cubin"]))

    triton.JITFunction.run = compile_and_report


def launch_all(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    lens, seq_lens = [1, 100], [600, 130]
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        sliding_window=window,
        cos_MD=torch.ones(256, dim // 2),
        sin_MD=torch.ones(256, dim // 2),
        norm_eps=1e-6,
    )
    metadata = AttentionMetadata(
        positions_T=torch.zeros(101, dtype=torch.int32),
        slots_T=torch.zeros(101, dtype=torch.int32),
        query_start_R1=torch.tensor([0, 1, 101], dtype=torch.int32),
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables_RP=torch.zeros(2, 9, dtype=torch.int32),
        query_lens=lens,
        seq_lens=seq_lens,
    )
    cache = torch.zeros(9, kv_heads, 2, 2, BLOCK, dim, dtype=dtype)
    norm_D = torch.ones(dim, dtype=dtype)
    qkv = torch.zeros(101, (heads + 2 * kv_heads) * dim, dtype=dtype)
    for norms in ((None, None), (norm_D, norm_D)):
        q_THD = rope.rope_and_write_kv(qkv, cache, 1, metadata, spec, *norms)
    tiles = attention.make_tiles(lens, seq_lens, spec, cache)
    attention.paged_attention(q_THD, cache, 1, metadata, spec, tiles)
    if dtype == torch.bfloat16:
        block_bytes = 4 * kv_heads * BLOCK * (dim + 4)
        codes = codes_of(torch.zeros(9, block_bytes, dtype=torch.uint8), torch.float8_e4m3fn, cache.shape[1:])
        rope.rope_and_write_kv(qkv, codes, 1, metadata, spec, None, None)
        attention.paged_attention(q_THD, codes, 1, metadata, spec, tiles[1:])
    x_TE = torch.zeros(101, 576, dtype=dtype)
    norm.rms_norm(x_TE, torch.ones(576, dtype=dtype), 1e-6)
    norm.rms_norm(x_TE, torch.ones(576, dtype=dtype), 1e-6, x_TE.clone())
    activation.silu_mul(torch.zeros(101, 3072, dtype=dtype))
    landed = torch.zeros(4, 2, kv_heads, 2, 2 * BLOCK, dim).transpose(1, 2)
    landing.land(landed, torch.zeros(4, dtype=torch.int32), cache, torch.zeros(8, dtype=torch.int32), num_tokens=99)
    words, rows = torch.zeros(4, 5000, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    digest.copy_and_digest(words, rows)
    digest.copy_and_digest(words, rows, words.clone(), rows)


if __name__ == "__main__":
    compile_instead_of_launching(int(sys.argv[1]))
    launch_all(*SHAPES[sys.argv[2]])
