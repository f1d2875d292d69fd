"""RMSNorm of the sum of a layer's output and the residual (Zhang and Sennrich, 2019), one program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve_kernels.triton_gpu.launch import padded


@triton.jit
def _add_and_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    WITH_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_WIDTH)
    mask = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if WITH_RESIDUAL:
        place = residual_ptr + row * residual_stride + column
        summed = (x + tl.load(place, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(place, summed, mask=mask)
        # The norm is of the sum as it is passed on, rounded.
        x = summed.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = x * scale * tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * WIDTH + column, y.to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, residual_TE: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual) * weight, x + residual), the second in the place of ``residual``; rows may lie apart."""
    num_rows, width = x_TE.shape
    if x_TE.stride(1) != 1:
        x_TE = x_TE.contiguous()
    total_TE = x_TE if residual_TE is None else residual_TE
    y_TE = torch.empty(num_rows, width, dtype=x_TE.dtype, device=x_TE.device)
    _add_and_norm[(num_rows,)](
        x_TE,
        total_TE,
        weight_E,
        y_TE,
        x_TE.stride(0),
        total_TE.stride(0),
        eps,
        WIDTH=width,
        PADDED_WIDTH=padded(width),
        WITH_RESIDUAL=residual_TE is not None,
        num_warps=8 if width > 2048 else 4,
    )
    return y_TE, total_TE
