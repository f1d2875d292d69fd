"""A decoder as one operation after another, for backends that do not fuse its step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pdserve_kernels.interface import AttentionMetadata, AttentionSpec, Backend, DecoderWeights


class DecoderOfOperations:
    """See interface.DecoderForward."""

    def __init__(self, backend: Backend, weights: DecoderWeights, spec: AttentionSpec) -> None:
        self._backend = backend
        self._weights = weights
        self._spec = spec

    @torch.inference_mode()
    def __call__(
        self,
        token_ids_T: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        logits_rows_N: torch.Tensor,
    ) -> torch.Tensor:
        backend, weights, eps = self._backend, self._weights, self._spec.norm_eps
        plan = backend.plan(metadata, self._spec, kv_cache)
        x_TE = weights.embedding_VE.index_select(0, token_ids_T)
        residual_TE: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            x_TE, residual_TE = backend.rms_norm(x_TE, layer.input_norm_E, eps, residual_TE)
            qkv = backend.linear(x_TE, layer.qkv)
            q_THD = backend.rope_and_write_kv(qkv, index, plan, layer.q_norm_D, layer.k_norm_D)
            x_TE = backend.linear(backend.paged_attention(q_THD, index, plan), layer.output)
            x_TE, residual_TE = backend.rms_norm(x_TE, layer.mlp_norm_E, eps, residual_TE)
            x_TE = backend.linear(backend.gated_linear(x_TE, layer.gate_up), layer.down)
        x_NE = x_TE.index_select(0, logits_rows_N)
        residual_NE = residual_TE.index_select(0, logits_rows_N) if residual_TE is not None else None
        x_NE, _ = backend.rms_norm(x_NE, weights.norm_E, eps, residual_NE)
        return backend.linear(x_NE, weights.head)
