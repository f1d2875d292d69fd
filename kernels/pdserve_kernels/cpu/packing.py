"""Weights in the order in which the products read them (csrc/kernels.h says which)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pdserve_kernels.cpu.layout import CHUNK, PANEL, Linear, Weights

if TYPE_CHECKING:
    from pdserve_kernels.cpu.memory import Arena


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """``tensors``: the memory that ``struct`` points into."""

    struct: Linear
    tensors: list[torch.Tensor]
    float32_output: bool
    gated: bool

    @property
    def outputs(self) -> int:
        return int(self.struct.outputs) // 2 if self.gated else int(self.struct.outputs)


def pack(
    arena: Arena,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    float32_output: bool = False,
    gated: bool = False,
    int8: bool = False,
) -> PackedWeight:
    """A weight [out, in] in panels; ``gated`` puts output i beside output i + out / 2."""
    outputs, inputs = weight.shape
    rows = _interleave(weight) if gated else _pad(weight, PANEL, 0)
    bias_rows = None
    if bias is not None:
        column = bias.float().unsqueeze(1)
        bias_rows = (_interleave(column) if gated else _pad(column, PANEL, 0)).flatten().contiguous()
    scales = None
    if weight.dtype == torch.float32:
        kind = Weights.F32
        panels = rows.view(-1, PANEL, inputs).transpose(1, 2)
    else:
        kind = Weights.BF16
        if int8:
            kind = Weights.INT8
            scales = rows.float().abs().amax(1) / 127
            rows = (rows.float() / scales.clamp(min=1e-30).unsqueeze(1)).round().to(torch.int8)
        rows = _pad(rows, CHUNK, 1)
        panels = rows.view(-1, PANEL, rows.shape[1] // 2, 2).transpose(1, 2)
    packed = arena.take(panels.numel() * panels.element_size()).view(panels.dtype).view(panels.shape)
    packed.copy_(panels)
    struct = Linear(
        weights=kind,
        inputs=inputs,
        outputs=outputs,
        panels=packed.data_ptr(),
        bias=bias_rows.data_ptr() if bias_rows is not None else 0,
        scales=scales.data_ptr() if scales is not None else 0,
    )
    tensors = [tensor for tensor in (packed, bias_rows, scales) if tensor is not None]
    return PackedWeight(struct, tensors, float32_output, gated)


def address(struct: ctypes.Structure | ctypes.Array[Any]) -> int:
    return ctypes.addressof(struct)


def pointer(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Of a tensor that a kernel takes as it is.

    Raises:
        ValueError: it is of another dtype, or not contiguous.
    """
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"a contiguous tensor of {dtype} is wanted, not {tensor.dtype}")
    return tensor.data_ptr()


def _pad(rows: torch.Tensor, unit: int, dim: int) -> torch.Tensor:
    missing = -rows.shape[dim] % unit
    if not missing:
        return rows
    shape = list(rows.shape)
    shape[dim] = missing
    return torch.cat((rows, rows.new_zeros(shape)), dim)


def _interleave(rows: torch.Tensor) -> torch.Tensor:
    """Panels of 32 outputs of the first half and the same 32 of the second."""
    first, second = (_pad(half, PANEL // 2, 0) for half in rows.chunk(2))
    both = torch.stack((first.view(-1, PANEL // 2, rows.shape[1]), second.view(-1, PANEL // 2, rows.shape[1])), 1)
    return both.view(-1, rows.shape[1])
