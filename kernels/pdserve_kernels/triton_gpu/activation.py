"""SiLU of the gate, times up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve_kernels.triton_gpu.launch import ceil_div

_COLUMNS = 1024


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, row_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    source = gate_up_ptr + row * row_stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """[T, 2F], gate before up -> silu(gate) * up [T, F], rounded once."""
    if gate_up_T2F.stride(1) != 1:
        gate_up_T2F = gate_up_T2F.contiguous()
    num_rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty(num_rows, width, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    _silu_mul[(num_rows, ceil_div(width, _COLUMNS))](
        gate_up_T2F, out_TF, gate_up_T2F.stride(0), WIDTH=width, COLUMNS=_COLUMNS
    )
    return out_TF
