"""FlashAttnBackend: the Triton backend with attention by the flash_attn package, an optional dependency.

Imports flash_attn only where a backend is made. Its paged mode takes blocks of a multiple of 256 tokens; a layer of the
cache is a strided view for it, so nothing is copied. Rows of one query go to the kernel that splits keys over the
device, all others to the one for packed sequences. Source: the documentation of ``flash_attn_with_kvcache`` and
``flash_attn_varlen_func`` (flash_attn 2.7).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pdserve_kernels.errors import NoFlashAttn
from pdserve_kernels.flash_attn import suits
from pdserve_kernels.triton_gpu.backend import TritonBackend, TritonPlan

if TYPE_CHECKING:
    from types import ModuleType

    from pdserve_kernels.interface import AttentionMetadata, AttentionSpec, Plan

VERSION = 1


@dataclass(frozen=True, slots=True)
class _Plan:
    """``num_decodes``: requests of one query each, before all others. ``kv_start_R1``: of the others alone, [R + 1]."""

    triton: TritonPlan
    num_decodes: int
    query_start_R1: torch.Tensor
    kv_start_R1: torch.Tensor
    max_query_len: int
    max_seq_len: int


class FlashAttnBackend(TritonBackend):
    """See interface.Backend.

    Args:
        module: the flash_attn package; a stand-in in tests.

    Raises:
        NoTriton: there is no CUDA device.
        NoFlashAttn: the package is not there or cannot be loaded.
    """

    def __init__(self, module: ModuleType | Any | None = None) -> None:
        super().__init__()
        self._flash_attn = _load() if module is None else module

    def fingerprint(self, dtype: torch.dtype) -> str:
        return f"flash_attn{VERSION}/{self._flash_attn.__version__}/{super().fingerprint(dtype)}"

    def plan(self, metadata: AttentionMetadata, spec: AttentionSpec, kv_cache: torch.Tensor) -> Plan:
        if not suits(kv_cache.shape[4], kv_cache.dtype):
            raise NoFlashAttn(f"it cannot use blocks of {kv_cache.shape[4]} tokens in {kv_cache.dtype}")
        query_lens = metadata.query_lens
        num_decodes = next((index for index, count in enumerate(query_lens) if count != 1), len(query_lens))
        query_start_R1, kv_start_R1 = metadata.query_start_R1[:0], metadata.query_start_R1[:0]
        if num_decodes < len(query_lens):
            query_start_R1 = metadata.query_start_R1[num_decodes:] - num_decodes
            kv_start_R1 = torch.zeros_like(query_start_R1)
            torch.cumsum(metadata.seq_lens_R[num_decodes:], 0, dtype=torch.int32, out=kv_start_R1[1:])
        return _Plan(
            triton=TritonPlan(metadata, spec, kv_cache, []),
            num_decodes=num_decodes,
            query_start_R1=query_start_R1,
            kv_start_R1=kv_start_R1,
            max_query_len=max(query_lens[num_decodes:], default=0),
            max_seq_len=max(metadata.seq_lens[num_decodes:], default=0),
        )

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        layer: int,
        plan: Plan,
        q_norm_D: torch.Tensor | None = None,
        k_norm_D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return super().rope_and_write_kv(qkv, layer, plan.triton, q_norm_D, k_norm_D)

    def paged_attention(self, q_THD: torch.Tensor, layer: int, plan: Plan) -> torch.Tensor:
        metadata, spec, num = plan.triton.metadata, plan.triton.spec, plan.num_decodes
        # [B, G, S, D] of this layer, seen as [B, S, G, D].
        k, v = (plan.triton.kv_cache[:, :, layer, side].transpose(1, 2) for side in (0, 1))
        window = (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0)
        options = {"softmax_scale": spec.scale, "causal": True, "window_size": window}
        parts = []
        if num:
            out_R1HD = self._flash_attn.flash_attn_with_kvcache(
                q_THD[:num].unsqueeze(1),
                k,
                v,
                cache_seqlens=metadata.seq_lens_R[:num],
                block_table=metadata.block_tables_RP[:num],
                **options,
            )
            parts.append(out_R1HD.squeeze(1))
        if num < len(metadata.query_lens):
            parts.append(
                self._flash_attn.flash_attn_varlen_func(
                    q_THD[num:],
                    k,
                    v,
                    plan.query_start_R1,
                    plan.kv_start_R1,
                    plan.max_query_len,
                    plan.max_seq_len,
                    block_table=metadata.block_tables_RP[num:],
                    **options,
                )
            )
        out_THD = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_THD.reshape(q_THD.shape[0], -1)


def _load() -> ModuleType:
    try:
        import flash_attn
    except ImportError as error:
        raise NoFlashAttn(str(error)) from error
    module: ModuleType = flash_attn
    return module
