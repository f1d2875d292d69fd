"""On a CUDA machine: every kernel against the float32 reference, and its time against the floor of that machine.

`python -m pdserve_kernels.triton_gpu.check` needs this package, torch and Triton, and nothing else; `make gpu-check`
begins with it. The floor of a kernel is the time to move its bytes at the bandwidth, or to do its products at the
speed, that a copy and a matrix product of torch reach in the same run; of these the longer. It exits with 1 where a
result is wrong, and with 3 where there is no CUDA device.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

from pdserve_kernels import flash_attn
from pdserve_kernels.digest import lanes_digest
from pdserve_kernels.flash_attn.backend import FlashAttnBackend
from pdserve_kernels.interface import AttentionMetadata, AttentionSpec
from pdserve_kernels.torch_backend import TorchBackend
from pdserve_kernels.triton_gpu.backend import TritonBackend
from pdserve_kernels.triton_gpu.digest import copy_and_digest
from pdserve_kernels.triton_gpu.landing import land
from pdserve_kernels.triton_gpu.launch import is_interpreted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOLERANCE = 2e-2
"""Of bfloat16 results: they are off by at most this, plus this share of the reference."""

_LOGITS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's layer and the steps it is tried with.

    Attributes:
        sliding_window: tried after none.
        landed_blocks: that the landing pass copies.
        steps: queries and tokens of each request.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    inner_size: int
    vocab_size: int
    block_size: int
    sliding_window: int
    landed_blocks: int
    steps: dict[str, list[tuple[int, int]]]


QWEN3_8B = Shape(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    inner_size=12288,
    vocab_size=151_936,
    block_size=16,
    sliding_window=1000,
    landed_blocks=1024,
    steps={
        "decode of 1": [(1, 2048)],
        "decode of 16": [(1, 2048)] * 16,
        "decode of 64, mixed": [(1, 64 * n) for n in range(1, 65)],
        "prefill of 2048": [(2048, 2048)],
        "last 512 of 4096, and decode of 8": [(512, 4096), *[(1, 1000)] * 8],
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel on one input.

    Attributes:
        run: computes the results; may be called again for its time alone.
        expected: the results in float32.
        num_bytes: read and written, each byte once.
        num_flops: of matrix products.
    """

    name: str
    run: Callable[[], tuple[torch.Tensor, ...]]
    expected: tuple[torch.Tensor, ...]
    num_bytes: int
    num_flops: int = 0
    tolerance: float = TOLERANCE

    def error(self) -> float:
        """The worst deviation over what is tolerated; NaN counts as infinite."""
        worst = 0.0
        for result, expected in zip(self.run(), self.expected, strict=True):
            deviation = (result.float() - expected).abs() / (self.tolerance * (1 + expected.abs()))
            worst = max(worst, float(deviation.nan_to_num(nan=float("inf")).max()))
        return worst


def cases(shape: Shape, device: torch.device) -> Iterator[Case]:
    """Every kernel in bfloat16; one case at a time holds memory."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator, device=device) * scale).bfloat16()

    ours, reference = TritonBackend(), TorchBackend()
    for name, spans in shape.steps.items():
        num_tokens = sum(query_len for query_len, _ in spans)
        yield from _norm_cases(name, random(num_tokens, shape.hidden_size), random(shape.hidden_size), random)
        yield _gated_case(name, shape, num_tokens, random)
        spec = _spec(shape, max(seq_len for _, seq_len in spans), device)
        metadata = _metadata(spans, shape.block_size, device)
        num_blocks = int(metadata.block_tables_RP.max()) + 1
        cache = random(num_blocks, shape.num_kv_heads, 2, 2, shape.block_size, shape.head_dim)
        yield _rope_case(name, spec, metadata, cache, random)
        for window in (None, shape.sliding_window):
            yield _attention_case(name, replace(spec, sliding_window=window), metadata, cache, random, ours)
    x, head = random(16, shape.hidden_size), random(shape.vocab_size, shape.hidden_size, scale=0.02)
    packed = ours.pack_linear(head, float32_output=True)
    yield Case(
        name="float32 logits of 16",
        run=lambda: (ours.linear(x, packed),),
        expected=(reference.linear(x, reference.pack_linear(head, float32_output=True)),),
        num_bytes=_bytes(x, head) + 4 * 16 * shape.vocab_size,
        num_flops=2 * 16 * head.numel(),
        tolerance=_LOGITS_TOLERANCE,
    )
    yield from _landing_cases(shape, random)
    yield _digest_case(shape, random)
    if flash_attn.is_installed() and not is_interpreted():
        yield from _flash_attn_cases(shape, device, random)


def _norm_cases(
    name: str, x: torch.Tensor, weight: torch.Tensor, random: Callable[..., torch.Tensor]
) -> Iterator[Case]:
    ours, reference = TritonBackend(), TorchBackend()
    residual = random(*x.shape)
    expected = reference.rms_norm(x.float(), weight.float(), 1e-6, residual.float())
    yield Case(
        name=f"norm with residual, {name}",
        run=lambda: ours.rms_norm(x, weight, 1e-6, residual),
        expected=expected,
        num_bytes=4 * _bytes(x) + _bytes(weight),
    )
    yield Case(
        name=f"norm, {name}",
        run=lambda: ours.rms_norm(x, weight, 1e-6)[:1],
        expected=reference.rms_norm(x.float(), weight.float(), 1e-6)[:1],
        num_bytes=2 * _bytes(x) + _bytes(weight),
    )


def _gated_case(name: str, shape: Shape, num_tokens: int, random: Callable[..., torch.Tensor]) -> Case:
    ours, reference = TritonBackend(), TorchBackend()
    x = random(num_tokens, shape.hidden_size)
    weight = random(2 * shape.inner_size, shape.hidden_size, scale=shape.hidden_size**-0.5)
    packed = ours.pack_gate_up(weight)
    return Case(
        name=f"gate, up and SiLU, {name}",
        run=lambda: (ours.gated_linear(x, packed),),
        expected=(reference.gated_linear(x.float(), reference.pack_gate_up(weight.float())),),
        num_bytes=_bytes(x, weight) + 2 * num_tokens * shape.inner_size,
        num_flops=2 * num_tokens * weight.numel(),
    )


def _rope_case(
    name: str,
    spec: AttentionSpec,
    metadata: AttentionMetadata,
    cache: torch.Tensor,
    random: Callable[..., torch.Tensor],
) -> Case:
    ours, reference = TritonBackend(), TorchBackend()
    qkv = random(metadata.positions_T.shape[0], (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    norms = random(spec.head_dim), random(spec.head_dim)
    plan = ours.plan(metadata, spec, cache)
    expected_cache = cache.float()
    expected_plan = reference.plan(metadata, spec, expected_cache)
    q_norm, k_norm = (norm.float() for norm in norms)
    expected_q = reference.rope_and_write_kv(qkv.float(), 1, expected_plan, q_norm, k_norm)
    return Case(
        name=f"RoPE and KV write, {name}",
        run=lambda: (ours.rope_and_write_kv(qkv, 1, plan, *norms), cache),
        expected=(expected_q, expected_cache),
        num_bytes=2 * _bytes(qkv),
    )


def _attention_case(
    name: str,
    spec: AttentionSpec,
    metadata: AttentionMetadata,
    cache: torch.Tensor,
    random: Callable[..., torch.Tensor],
    ours: TritonBackend,
) -> Case:
    reference = TorchBackend()
    q_THD = random(metadata.positions_T.shape[0], spec.num_heads, spec.head_dim)
    plan = ours.plan(metadata, spec, cache)
    expected_plan = reference.plan(metadata, spec, cache.float())
    window = spec.sliding_window or max(metadata.seq_lens)
    num_keys = num_pairs = 0
    for query_len, seq_len in zip(metadata.query_lens, metadata.seq_lens, strict=True):
        num_keys += min(seq_len, window + query_len - 1)
        num_pairs += sum(min(position + 1, window) for position in range(seq_len - query_len, seq_len))
    return Case(
        name=f"{'flash_attn' if isinstance(ours, FlashAttnBackend) else 'attention'}, {name}"
        + (f", window {spec.sliding_window}" if spec.sliding_window else ""),
        run=lambda: (ours.paged_attention(q_THD, 1, plan),),
        expected=(reference.paged_attention(q_THD.float(), 1, expected_plan),),
        num_bytes=2 * _bytes(q_THD) + num_keys * 2 * spec.num_kv_heads * spec.head_dim * cache.itemsize,
        num_flops=4 * num_pairs * spec.num_heads * spec.head_dim,
    )


def _landing_cases(shape: Shape, random: Callable[..., torch.Tensor]) -> Iterator[Case]:
    """The same layout; then half blocks of float32, heads after tokens."""
    heads, size, dim, num_slots, num_layers = (
        shape.num_kv_heads,
        shape.block_size,
        shape.head_dim,
        shape.landed_blocks,
        4,
    )
    cache = torch.zeros_like(random(num_slots, heads, num_layers, 2, size, dim))
    order = torch.randperm(num_slots, device=cache.device).int()
    same = random(*cache.shape)
    other = random(2 * num_slots, size // 2, num_layers, 2, heads, dim).float().permute(0, 4, 2, 3, 1, 5)
    halves = torch.stack((2 * order, 2 * order + 1), dim=1).view(-1)
    blocks = torch.arange(num_slots, device=cache.device).int()
    joined = torch.cat((other[halves[::2].long()], other[halves[1::2].long()]), dim=4)
    for name, landed, slots, expected in (
        ("landing, same layout", same, order, same[order.long()]),
        ("landing, half blocks of float32", other, halves, joined),
    ):

        def run(landed: torch.Tensor = landed, slots: torch.Tensor = slots) -> tuple[torch.Tensor, ...]:
            land(landed, slots, cache, blocks, num_tokens=num_slots * size)
            return (cache,)

        yield Case(name=name, run=run, expected=(expected.float(),), num_bytes=_bytes(landed, cache))


def _digest_case(shape: Shape, random: Callable[..., torch.Tensor]) -> Case:
    """Blocks copied and digested in one pass, out of order; the digests as numbers beside the words."""
    num, row = shape.landed_blocks, 2 * 2 * shape.num_kv_heads * shape.block_size * shape.head_dim
    source = random(num, row).view(torch.int32)
    target = torch.zeros_like(source)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(2)).int().to(source.device)
    places = torch.arange(num, device=source.device).int()
    expected = [
        np.frombuffer(lanes_digest(block), dtype="<i4") for block in source[order.long()].cpu().numpy().view(np.uint8)
    ]

    def run() -> tuple[torch.Tensor, ...]:
        sums = copy_and_digest(source, order, target, places)
        # As halves of words: float32 holds no larger whole number exactly.
        return tuple(part for numbers in (sums, target) for part in (numbers & 0xFFFF, numbers >> 16))

    sums, words = torch.from_numpy(np.stack(expected)).to(source.device), source[order.long()]
    return Case(
        name="landing with digests, same layout",
        run=run,
        expected=tuple(part.float() for numbers in (sums, words) for part in (numbers & 0xFFFF, numbers >> 16)),
        num_bytes=_bytes(source, target),
        tolerance=1e-6,
    )


def _flash_attn_cases(shape: Shape, device: torch.device, random: Callable[..., torch.Tensor]) -> Iterator[Case]:
    """Attention of every step by flash_attn, over blocks of its own size."""
    for name, spans in shape.steps.items():
        spec = _spec(shape, max(seq_len for _, seq_len in spans), device)
        metadata = _metadata(spans, flash_attn.BLOCK_SIZE_UNIT, device)
        num_blocks = int(metadata.block_tables_RP.max()) + 1
        cache = random(num_blocks, shape.num_kv_heads, 2, 2, flash_attn.BLOCK_SIZE_UNIT, shape.head_dim)
        for window in (None, shape.sliding_window):
            windowed = replace(spec, sliding_window=window)
            yield _attention_case(name, windowed, metadata, cache, random, FlashAttnBackend())


def _spec(shape: Shape, num_positions: int, device: torch.device) -> AttentionSpec:
    frequencies = 1e6 ** -torch.linspace(0, 1, shape.head_dim // 2, device=device)
    angles_MD = torch.arange(num_positions, device=device).unsqueeze(1) * frequencies
    return AttentionSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        sliding_window=None,
        cos_MD=angles_MD.cos(),
        sin_MD=angles_MD.sin(),
        norm_eps=1e-6,
    )


def _metadata(spans: list[tuple[int, int]], block_size: int, device: torch.device) -> AttentionMetadata:
    """Requests whose blocks lie all over the cache."""
    num_blocks = [-(-seq_len // block_size) for _, seq_len in spans]
    free = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(0))
    tables = torch.zeros(len(spans), max(num_blocks), dtype=torch.int64)
    positions, slots, starts = [], [], [0]
    for index, (query_len, seq_len) in enumerate(spans):
        mine, free = free[: num_blocks[index]], free[num_blocks[index] :]
        tables[index, : len(mine)] = mine
        position = torch.arange(seq_len - query_len, seq_len)
        positions.append(position)
        slots.append(mine[position // block_size] * block_size + position % block_size)
        starts.append(starts[-1] + query_len)
    seq_lens = [seq_len for _, seq_len in spans]
    return AttentionMetadata(
        positions_T=torch.cat(positions).int().to(device),
        slots_T=torch.cat(slots).int().to(device),
        query_start_R1=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables_RP=tables.int().to(device),
        query_lens=[query_len for query_len, _ in spans],
        seq_lens=seq_lens,
    )


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _seconds(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, return_mode="median")) / 1e3


def device_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy of torch reads and writes."""
    source = torch.zeros(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source))


def _device_peak(device: torch.device) -> float:
    """Floating-point operations a second of a product of bfloat16 matrices."""
    matrix = torch.randn(8192, 8192, device=device).bfloat16()
    return 2 * 8192**3 / _seconds(lambda: matrix @ matrix)


@torch.inference_mode()
def main() -> int:
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was checked")
        return 3
    device = torch.device("cuda")
    bandwidth, flops = device_bandwidth(device), _device_peak(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s, a product of bfloat16 does {flops / 1e12:.0f} TFLOP/s\n")
    print(f"{'kernel':<64} {'error':>8} {'us':>9} {'floor us':>9} {'ratio':>6}")
    num_wrong = 0
    for case in cases(QWEN3_8B, device):
        error = case.error()
        num_wrong += error > 1
        seconds, floor = _seconds(case.run), max(case.num_bytes / bandwidth, case.num_flops / flops)
        verdict = "" if error <= 1 else "  WRONG"
        times = f"{seconds * 1e6:>9.1f} {floor * 1e6:>9.1f} {seconds / floor:>6.2f}"
        print(f"{case.name:<64} {error:>8.3f} {times}{verdict}")
    print(f"\n{num_wrong} wrong; an error of 1 is all that is tolerated")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
