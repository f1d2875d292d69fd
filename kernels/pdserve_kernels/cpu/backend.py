"""CpuBackend: the interface over the C kernels. Tensors in, pointers down; no arithmetic of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pdserve_kernels.cpu import _native
from pdserve_kernels.cpu.layout import CHUNK, DType, Epilogue, Layer, Linear, Model, Step
from pdserve_kernels.cpu.memory import Arena, large_pages
from pdserve_kernels.cpu.packing import PackedWeight, address, pack, pointer
from pdserve_kernels.errors import NoSuchFamily
from pdserve_kernels.kv_blocks import Number
from pdserve_kernels.quantized_cache import scales_at

if TYPE_CHECKING:
    from pdserve_kernels.interface import AttentionMetadata, AttentionSpec, DecoderWeights

VERSION = 3

_NUMBERS = {
    torch.bfloat16: Number.BF16,
    torch.float32: Number.F32,
    torch.int8: Number.INT8,
    torch.float8_e4m3fn: Number.FP8,
}


@dataclass(frozen=True, slots=True)
class _Plan:
    """``kept``: tensors that the structs point into."""

    model: Model
    step: Step
    kept: list[torch.Tensor]

    def model_for(self, x: torch.Tensor) -> Model:
        """What is computed in ``x``'s dtype, which a cache of codes does not say."""
        if self.step.kv_number in (Number.INT8, Number.FP8):
            self.model.dtype = _dtype(x)
        return self.model


class CpuBackend:
    """See interface.Backend.

    Args:
        family: instruction family; by default the best that the machine has.
        int8: keep the weights of the layers as 8-bit whole numbers with a scale for each output.

    Raises:
        NoSuchFamily
    """

    graph_safe = False
    # The heads of a layer side by side: a core reads a tenth more a second from pages that are neighbours.
    kv_order = "LG2SD"

    def __init__(self, family: str | None = None, *, int8: bool = False) -> None:
        known = _native.families()
        self.family = family or known[0]
        if self.family not in known:
            raise NoSuchFamily(self.family, known)
        self._kernels = _native.find(self.family)
        self._int8 = int8
        self._arena = Arena()

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)
        _native.set_threads(count)

    def fingerprint(self, dtype: torch.dtype) -> str:
        weights = "/int8" if self._int8 else ""
        return f"c{VERSION}/{self.family}/{_native.processor()}/{str(dtype).removeprefix('torch.')}{weights}"

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, float32_output: bool = False
    ) -> PackedWeight:
        int8 = self._int8 and not float32_output and weight.dtype == torch.bfloat16
        return pack(self._arena, weight, bias, float32_output=float32_output, int8=int8)

    def pack_gate_up(self, weight_2FE: torch.Tensor) -> PackedWeight:
        int8 = self._int8 and weight_2FE.dtype == torch.bfloat16
        return pack(self._arena, weight_2FE, None, gated=True, int8=int8)

    def linear(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        epilogue = (
            Epilogue.SILU_MUL if packed.gated else Epilogue.STORE_F32 if packed.float32_output else Epilogue.STORE
        )
        rows, inputs = x.shape
        if inputs != packed.struct.inputs:
            raise ValueError(f"x has {inputs} columns, the weight {packed.struct.inputs}")
        if x.dtype != torch.float32 and inputs % CHUNK:
            x = torch.nn.functional.pad(x, (0, -inputs % CHUNK))
        x = x.contiguous()
        y = torch.empty(rows, packed.outputs, dtype=torch.float32 if packed.float32_output else x.dtype)
        weight = address(packed.struct)
        _native.linear(self._kernels, weight, epilogue, rows, x.data_ptr(), x.shape[1], y.data_ptr(), y.shape[1])
        return y

    def gated_linear(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        return self.linear(x, packed)

    def rms_norm(
        self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, residual_TE: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual_TE is not None:
            x_TE = residual_TE.add_(x_TE)
        x_TE, weight_E = x_TE.contiguous(), weight_E.float()
        y = torch.empty_like(x_TE)
        rows, width = x_TE.shape
        dtype = _dtype(x_TE)
        _native.rms_norm(self._kernels, dtype, x_TE.data_ptr(), weight_E.data_ptr(), eps, y.data_ptr(), width, rows)
        return y, x_TE

    def plan(self, metadata: AttentionMetadata, spec: AttentionSpec, kv_cache: torch.Tensor) -> _Plan:
        model = _attention_model(spec, DType.F32 if kv_cache.dtype == torch.float32 else DType.BF16)
        step = Step()
        kept = _fill_step(step, metadata)
        _fill_cache(step, kv_cache)
        scratch = torch.empty(_native.attention_scratch(address(model)), dtype=torch.uint8)
        step.scratch = scratch.data_ptr()
        _native.check_step(address(model), address(step))
        return _Plan(model, step, [*kept, scratch, spec.cos_MD, spec.sin_MD])

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        layer: int,
        plan: _Plan,
        q_norm_D: torch.Tensor | None = None,
        k_norm_D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        model = plan.model_for(qkv)
        qkv = qkv.clone(memory_format=torch.contiguous_format)
        norms = [norm.float() if norm is not None else None for norm in (q_norm_D, k_norm_D)]
        q_norm, k_norm = (norm.data_ptr() if norm is not None else 0 for norm in norms)
        _native.rope_write(
            self._kernels, address(model), address(plan.step), layer, q_norm, k_norm, qkv.data_ptr(), qkv.shape[1]
        )
        return qkv[:, : model.num_heads * model.head_dim].view(-1, model.num_heads, model.head_dim)

    def paged_attention(self, q_THD: torch.Tensor, layer: int, plan: _Plan) -> torch.Tensor:
        tokens, heads, dim = q_THD.shape
        if q_THD.stride(2) != 1 or q_THD.stride(1) != dim:
            q_THD = q_THD.contiguous()
        out = torch.empty(tokens, heads * dim, dtype=q_THD.dtype)
        _native.attention(
            self._kernels,
            address(plan.model_for(q_THD)),
            address(plan.step),
            layer,
            q_THD.data_ptr(),
            q_THD.stride(0),
            out.data_ptr(),
            heads * dim,
            plan.step.scratch,
        )
        return out

    def decoder(self, weights: DecoderWeights, spec: AttentionSpec) -> CpuDecoder:
        return CpuDecoder(self._kernels, weights, spec)


class CpuDecoder:
    """A whole decoder, a call of C a step. See interface.DecoderForward."""

    def __init__(self, kernels: int, weights: DecoderWeights, spec: AttentionSpec) -> None:
        self._kernels = kernels
        self._kept: list[object] = [weights, spec]
        embedding = weights.embedding_VE.contiguous()
        layers = (Layer * len(weights.layers))()
        for struct, layer in zip(layers, weights.layers, strict=True):
            struct.input_norm = self._float32(layer.input_norm_E)
            struct.mlp_norm = self._float32(layer.mlp_norm_E)
            struct.q_norm = self._float32(layer.q_norm_D)
            struct.k_norm = self._float32(layer.k_norm_D)
            for name in ("qkv", "output", "gate_up", "down"):
                setattr(struct, name, getattr(layer, name).struct)
        self._kept += [layers, embedding]
        self._model = model = _attention_model(spec, _dtype(embedding))
        model.num_layers = len(weights.layers)
        model.vocab, model.hidden = embedding.shape
        down: Linear = weights.layers[0].down.struct
        model.inner = down.inputs
        model.embedding = embedding.data_ptr()
        model.final_norm = self._float32(weights.norm_E)
        model.layers = address(layers)
        model.head = weights.head.struct
        self._step = Step()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._logits_NV = self._most_logits_NV = torch.empty(0, model.vocab)
        self._kv_cache: torch.Tensor | None = None

    def _float32(self, weight: torch.Tensor | None) -> int:
        if weight is None:
            return 0
        weight = weight.float().contiguous()
        self._kept.append(weight)
        return weight.data_ptr()

    def __call__(
        self,
        token_ids_T: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        logits_rows_N: torch.Tensor,
    ) -> torch.Tensor:
        # What is touched here was forgotten by every cache of the processor in the step before: each torch operation
        # that is left out saves 10 to 100 us.
        step, model = self._step, self._model
        num_logits = len(logits_rows_N)
        kept = _fill_step(step, metadata)
        if kv_cache is not self._kv_cache:
            _fill_cache(step, kv_cache)
            self._kv_cache = kv_cache
        self._reserve(max(len(token_ids_T), num_logits), num_logits)
        step.token_ids = pointer(token_ids_T, torch.int32)
        step.logits_rows = pointer(logits_rows_N, torch.int64)
        _native.forward(self._kernels, address(model), address(step))
        del kept
        return self._logits_NV

    def _reserve(self, tokens: int, num_logits: int) -> None:
        """Buffers of the largest step so far, since fresh memory costs a step more than many of its operations."""
        step, model = self._step, address(self._model)
        tokens = -(-max(tokens, step.scratch_tokens) // 64) * 64
        needed = _native.scratch_bytes(model, tokens)  # of the threads that there are now
        if tokens > step.scratch_tokens or needed > len(self._scratch):
            self._scratch = large_pages(needed)
            step.scratch, step.scratch_tokens = self._scratch.data_ptr(), tokens
        if num_logits != step.num_logits:
            if num_logits > len(self._most_logits_NV):
                self._most_logits_NV = torch.empty(num_logits, self._model.vocab)
            self._logits_NV = self._most_logits_NV[:num_logits]
            step.num_logits, step.logits = num_logits, self._logits_NV.data_ptr()


def _attention_model(spec: AttentionSpec, dtype: DType) -> Model:
    return Model(
        dtype=dtype,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.sliding_window or 0,
        num_positions=len(spec.cos_MD),
        cos=pointer(spec.cos_MD, torch.float32),
        sin=pointer(spec.sin_MD, torch.float32),
        scale=spec.scale,
        eps=spec.norm_eps,
    )


def _fill_step(step: Step, metadata: AttentionMetadata) -> list[torch.Tensor]:
    """Writes where a step's tensors lie; returns those that must live as long."""
    tables_RP = metadata.block_tables_RP
    if tables_RP.stride(1) != 1:
        tables_RP = tables_RP.contiguous()
    step.num_tokens = len(metadata.positions_T)
    step.num_requests = len(metadata.seq_lens_R)
    step.positions = pointer(metadata.positions_T, torch.int32)
    step.slots = pointer(metadata.slots_T, torch.int32)
    step.query_start = pointer(metadata.query_start_R1, torch.int32)
    step.seq_lens = pointer(metadata.seq_lens_R, torch.int32)
    step.block_tables, step.block_stride = tables_RP.data_ptr(), tables_RP.stride(0)
    return [metadata.positions_T, metadata.slots_T, metadata.query_start_R1, metadata.seq_lens_R, tables_RP]


def _fill_cache(step: Step, kv_cache: torch.Tensor) -> None:
    """Writes where the KV cache lies, and how."""
    block_GL2SD = kv_cache[0]
    if not (block_GL2SD.is_contiguous() or block_GL2SD.transpose(0, 1).is_contiguous()):
        raise ValueError("the blocks of a KV cache are contiguous, heads before layers or layers before heads")
    step.kv_cache = kv_cache.data_ptr()
    step.num_blocks, _, _, _, step.block_size, head_dim = kv_cache.shape
    step.kv_head_rows, step.kv_layer_rows = (kv_cache.stride(axis) // head_dim for axis in (1, 2))
    step.kv_number = _NUMBERS[kv_cache.dtype]
    step.block_bytes = kv_cache.stride(0) * kv_cache.itemsize
    step.scales_at = scales_at(block_GL2SD.numel())


def _dtype(tensor: torch.Tensor) -> DType:
    return {torch.bfloat16: DType.BF16, torch.float32: DType.F32}[tensor.dtype]
