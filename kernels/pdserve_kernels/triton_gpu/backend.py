"""TritonBackend: the interface over the Triton kernels. Matrix products of weights are torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton

from pdserve_kernels.errors import NoTriton
from pdserve_kernels.operations import DecoderOfOperations
from pdserve_kernels.triton_gpu.activation import silu_mul
from pdserve_kernels.triton_gpu.attention import Tiles, make_tiles, paged_attention
from pdserve_kernels.triton_gpu.launch import is_interpreted
from pdserve_kernels.triton_gpu.norm import rms_norm
from pdserve_kernels.triton_gpu.rope import rope_and_write_kv

if TYPE_CHECKING:
    from pdserve_kernels.interface import AttentionMetadata, AttentionSpec, DecoderWeights, Plan

VERSION = 2


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None
    float32_output: bool


@dataclass(frozen=True, slots=True)
class TritonPlan:
    metadata: AttentionMetadata
    spec: AttentionSpec
    kv_cache: torch.Tensor
    tiles: list[Tiles]


class TritonBackend:
    """See interface.Backend. The tensors of weights, tables, metadata and cache are on one CUDA device.

    Raises:
        NoTriton: there is no CUDA device, and Triton's interpreter is not in its place.
    """

    def __init__(self) -> None:
        if not is_interpreted() and not torch.cuda.is_available():
            raise NoTriton("torch sees no CUDA device")

    graph_safe = True
    kv_order = "GL2SD"

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def fingerprint(self, dtype: torch.dtype) -> str:
        device = "interpreter" if is_interpreted() else torch.cuda.get_device_name()
        parts = [f"triton{VERSION}", triton.__version__, torch.__version__, str(dtype).removeprefix("torch."), device]
        return "/".join(parts)

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, float32_output: bool = False
    ) -> _Linear:
        # On CPUs torch has no product of bfloat16 matrices with a float32 result.
        if float32_output and weight.device.type == "cpu":
            weight = weight.float()
        return _Linear(weight, bias, float32_output)

    def linear(self, x: torch.Tensor, packed: _Linear) -> torch.Tensor:
        weight, bias = packed.weight, packed.bias
        if not packed.float32_output:
            return F.linear(x, weight, bias)
        if weight.dtype == torch.float32:
            return F.linear(x.float(), weight, bias.float() if bias is not None else None)
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)
        return logits if bias is None else logits.add_(bias)

    def pack_gate_up(self, weight_2FE: torch.Tensor) -> _Linear:
        return self.pack_linear(weight_2FE)

    def gated_linear(self, x_TE: torch.Tensor, packed: _Linear) -> torch.Tensor:
        return silu_mul(self.linear(x_TE, packed))

    def decoder(self, weights: DecoderWeights, spec: AttentionSpec) -> DecoderOfOperations:
        return DecoderOfOperations(self, weights, spec)

    def rms_norm(
        self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, residual_TE: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x_TE, weight_E, eps, residual_TE)

    def plan(self, metadata: AttentionMetadata, spec: AttentionSpec, kv_cache: torch.Tensor) -> Plan:
        return TritonPlan(metadata, spec, kv_cache, make_tiles(metadata.query_lens, metadata.seq_lens, spec, kv_cache))

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        layer: int,
        plan: Plan,
        q_norm_D: torch.Tensor | None = None,
        k_norm_D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return rope_and_write_kv(qkv, plan.kv_cache, layer, plan.metadata, plan.spec, q_norm_D, k_norm_D)

    def paged_attention(self, q_THD: torch.Tensor, layer: int, plan: Plan) -> torch.Tensor:
        return paged_attention(q_THD, plan.kv_cache, layer, plan.metadata, plan.spec, plan.tiles)
