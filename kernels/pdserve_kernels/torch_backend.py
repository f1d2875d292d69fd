"""The reference backend: plain torch on any device, each operation as the interface states it.

Each request attends on its own, so that its result does not depend on the others of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pdserve_kernels.operations import DecoderOfOperations
from pdserve_kernels.quantized_cache import dequantize, is_quantized, quantize, scales_of

if TYPE_CHECKING:
    from pdserve_kernels.interface import AttentionMetadata, AttentionSpec, DecoderWeights

VERSION = 1


@dataclass(frozen=True, slots=True)
class _Linear:
    """A weight as torch takes it, or (on CPU) in oneDNN's order, which is twice as fast for few rows."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    onednn: bool
    float32_output: bool


@dataclass(frozen=True, slots=True)
class _Request:
    """``rows``: rows of the cache [B * G * L * 2, S * D] that hold this request's keys of layer 0, head by head."""

    start: int
    end: int
    seq_len: int
    blocks_P: torch.Tensor
    rows: torch.Tensor
    causal: bool
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """``cache_rows``: see _Request; ``scales``: [B, G, L, 2, S]. One of the two is None."""

    spec: AttentionSpec
    requests: list[_Request]
    cos_T1D: torch.Tensor
    sin_T1D: torch.Tensor
    block_T: torch.Tensor
    offset_T: torch.Tensor
    kv_cache: torch.Tensor
    cache_rows: torch.Tensor | None
    scales: torch.Tensor | None

    def write(self, layer: int, side: int, rows_TGD: torch.Tensor) -> None:
        """Keys (side 0) or values (1) of the step into the cache."""
        if self.scales is None:
            self.kv_cache[:, :, layer, side][self.block_T, :, self.offset_T] = rows_TGD
            return
        codes_TGD, scales_TG = quantize(rows_TGD, self.kv_cache.dtype)
        # Torch has no indexing of float8.
        self.kv_cache.view(torch.uint8)[:, :, layer, side][self.block_T, :, self.offset_T] = codes_TGD.view(torch.uint8)
        self.scales[:, :, layer, side][self.block_T, :, self.offset_T] = scales_TG

    def read(self, layer: int, side: int, request: _Request, dtype: torch.dtype) -> torch.Tensor:
        """A request's keys or values, [1, G, N, D]."""
        shape = (1, self.spec.num_kv_heads, -1, self.spec.head_dim)
        if self.scales is None:
            assert self.cache_rows is not None, "a plain cache has rows"
            rows = self.cache_rows[2 * layer + side :].index_select(0, request.rows)
        else:
            codes = self.kv_cache.view(torch.uint8)[request.blocks_P, :, layer, side].view(self.kv_cache.dtype)
            rows = dequantize(codes, self.scales[request.blocks_P, :, layer, side], dtype).transpose(0, 1)
        return rows.reshape(shape)[:, :, : request.seq_len]


class TorchBackend:
    """See interface.Backend."""

    graph_safe = False
    kv_order = "GL2SD"

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def fingerprint(self, dtype: torch.dtype) -> str:
        parts = [f"torch{VERSION}", torch.__version__, str(dtype).removeprefix("torch.")]
        capabilities = torch.cpu.get_capabilities()
        parts.append(str(capabilities.get("cpu_name", "cpu")))
        parts += [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if capabilities.get(name)]
        parts.append(f"threads{torch.get_num_threads()}")
        return "/".join(parts)

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, float32_output: bool = False
    ) -> _Linear:
        if float32_output:
            weight, bias = weight.float(), bias.float() if bias is not None else None
        onednn = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if onednn:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return _Linear(weight, bias, onednn, float32_output)

    def linear(self, x: torch.Tensor, packed: _Linear) -> torch.Tensor:
        if packed.float32_output:
            x = x.float()
        if packed.onednn:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
            return y
        return F.linear(x, packed.weight, packed.bias)

    def pack_gate_up(self, weight_2FE: torch.Tensor) -> _Linear:
        return self.pack_linear(weight_2FE)

    def gated_linear(self, x_TE: torch.Tensor, packed: _Linear) -> torch.Tensor:
        return self.silu_mul(self.linear(x_TE, packed))

    def decoder(self, weights: DecoderWeights, spec: AttentionSpec) -> DecoderOfOperations:
        return DecoderOfOperations(self, weights, spec)

    def rms_norm(
        self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, residual_TE: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual_TE is not None:
            x_TE = residual_TE.add_(x_TE)
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps), x_TE

    def silu_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """[T, 2F], gate before up -> silu(gate) * up [T, F]."""
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        return F.silu(gate_TF).mul_(up_TF)

    def plan(self, metadata: AttentionMetadata, spec: AttentionSpec, kv_cache: torch.Tensor) -> _Plan:
        _, kv_heads, layers, _, block_size, head_dim = kv_cache.shape
        positions_T = metadata.positions_T
        slots_T = metadata.slots_T.long()
        heads_G1 = torch.arange(kv_heads, device=kv_cache.device).unsqueeze(1)
        tables_RP = metadata.block_tables_RP.long()
        rows_RGP = (tables_RP.unsqueeze(1) * kv_heads + heads_G1) * (layers * 2)
        requests = []
        start = 0
        for index, (query_len, seq_len) in enumerate(zip(metadata.query_lens, metadata.seq_lens, strict=True)):
            num_blocks = -(-seq_len // block_size)
            rows = rows_RGP[index, :, :num_blocks].reshape(-1)
            mask = _mask(query_len, seq_len, spec.sliding_window, kv_cache.device)
            causal = mask is None and query_len > 1
            blocks_P = tables_RP[index, :num_blocks]
            requests.append(_Request(start, start + query_len, seq_len, blocks_P, rows, causal, mask))
            start += query_len
        return _Plan(
            spec=spec,
            requests=requests,
            cos_T1D=spec.cos_MD.index_select(0, positions_T).unsqueeze(1),
            sin_T1D=spec.sin_MD.index_select(0, positions_T).unsqueeze(1),
            block_T=slots_T // block_size,
            offset_T=slots_T % block_size,
            kv_cache=kv_cache,
            cache_rows=None if is_quantized(kv_cache) else kv_cache.view(-1, block_size * head_dim),
            scales=scales_of(kv_cache) if is_quantized(kv_cache) else None,
        )

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        layer: int,
        plan: _Plan,
        q_norm_D: torch.Tensor | None = None,
        k_norm_D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        spec = plan.spec
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv_TXD = qkv.view(-1, heads + 2 * kv_heads, head_dim)
        qk_TXD = qkv_TXD[:, : heads + kv_heads]
        if q_norm_D is not None and k_norm_D is not None:
            q_THD = F.rms_norm(qk_TXD[:, :heads], (head_dim,), q_norm_D, spec.norm_eps)
            k_TGD = F.rms_norm(qk_TXD[:, heads:], (head_dim,), k_norm_D, spec.norm_eps)
            qk_TXD = torch.cat((q_THD, k_TGD), dim=1)
        first, second = qk_TXD.float().chunk(2, dim=-1)
        cos, sin = plan.cos_T1D, plan.sin_T1D
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
        plan.write(layer, 0, rotated[:, heads:])
        plan.write(layer, 1, qkv_TXD[:, heads + kv_heads :])
        return rotated[:, :heads]

    def paged_attention(self, q_THD: torch.Tensor, layer: int, plan: _Plan) -> torch.Tensor:
        spec = plan.spec
        num_tokens = q_THD.shape[0]
        out_THD = torch.empty(num_tokens, spec.num_heads, spec.head_dim, dtype=q_THD.dtype, device=q_THD.device)
        for request in plan.requests:
            k_1GND, v_1GND = (plan.read(layer, side, request, q_THD.dtype) for side in (0, 1))
            q = q_THD[request.start : request.end]
            mask = request.mask.to(q.dtype) if request.mask is not None else None
            if request.end - request.start == 1:
                # One token: the query heads that share a KV head are the rows of one small matrix.
                q = q.reshape(1, spec.num_kv_heads, -1, spec.head_dim)
                out = F.scaled_dot_product_attention(q, k_1GND, v_1GND, attn_mask=mask, scale=spec.scale)
                out_THD[request.start] = out.view(spec.num_heads, spec.head_dim)
                continue
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                k_1GND,
                v_1GND,
                attn_mask=mask,
                is_causal=request.causal,
                scale=spec.scale,
                enable_gqa=True,
            )
            out_THD[request.start : request.end] = out[0].transpose(0, 1)
        return out_THD.view(num_tokens, -1)


def _mask(query_len: int, seq_len: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """What is added to the scores [query_len, seq_len]; None where torch's own causal order says the same."""
    sees_all_before = window is None or window >= seq_len
    if sees_all_before and query_len in (1, seq_len):
        return None
    query = torch.arange(seq_len - query_len, seq_len, device=device).unsqueeze(1)
    key = torch.arange(seq_len, device=device).unsqueeze(0)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    mask = torch.zeros(query_len, seq_len, device=device)
    return mask.masked_fill_(hidden, float("-inf"))
