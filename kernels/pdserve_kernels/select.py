"""A backend by its name."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from pdserve_kernels import cpu, flash_attn, triton_gpu
from pdserve_kernels.errors import NoFlashAttn, NoQuantization, NotBuilt, NoTriton, UnknownBackend
from pdserve_kernels.torch_backend import TorchBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pdserve_kernels.interface import Backend, Quantization

FAMILY_VARIABLE = "PDSERVE_CPU_ISA"
"""Environment variable that forces an instruction family: amx, avx512, avx2 or portable."""

log = logging.getLogger(__name__)


def _cpu(*, int8: bool = False) -> Backend:
    if not cpu.is_built():
        raise NotBuilt
    from pdserve_kernels.cpu.backend import CpuBackend

    return CpuBackend(os.environ.get(FAMILY_VARIABLE) or None, int8=int8)


def _auto() -> Backend:
    if cpu.is_built():
        return _cpu()
    log.warning("the C kernels are not installed; torch computes instead, at about half the speed")
    return TorchBackend()


def _auto_on_gpu(block_size: int, dtype: torch.dtype | None) -> Backend:
    if not triton_gpu.is_installed():
        log.warning("Triton is not installed (the extra `cuda`); torch computes instead, one request after another")
        return TorchBackend()
    if flash_attn.is_installed() and flash_attn.suits(block_size, dtype):
        return _flash_attn()
    return _triton()


def _triton() -> Backend:
    if not triton_gpu.is_installed():
        raise NoTriton("triton is not installed (the extra `cuda`)")
    from pdserve_kernels.triton_gpu.backend import TritonBackend

    return TritonBackend()


def _flash_attn() -> Backend:
    if not triton_gpu.is_installed():
        raise NoTriton("triton is not installed (the extra `cuda`)")
    from pdserve_kernels.flash_attn.backend import FlashAttnBackend

    return FlashAttnBackend()


_BACKENDS: dict[str, Callable[[], Backend]] = {
    "auto": _auto,
    "cpu": _cpu,
    "torch": TorchBackend,
    "triton": _triton,
    "flash_attn": _flash_attn,
}


def _with_int8(name: str, device_type: str, dtype: torch.dtype | None) -> Backend:
    if name not in ("auto", "cpu") or device_type != "cpu":
        raise NoQuantization("int8", "only the C kernels for CPUs have them")
    if not cpu.is_built():
        raise NoQuantization("int8", "the C kernels are not installed")
    if dtype is not None and str(dtype) != "torch.bfloat16":
        raise NoQuantization("int8", "everything else must be bfloat16")
    return _cpu(int8=True)


def _check_quantized_cache(name: str, device_type: str, dtype: torch.dtype | None) -> None:
    if name == "flash_attn":
        raise NoFlashAttn("it reads no KV cache of int8 or fp8")
    if str(dtype) == "torch.float32" and (name == "triton" or (name == "auto" and device_type == "cuda")):
        raise NoTriton("with float32 they read no KV cache of int8 or fp8")


def select_backend(
    name: str = "auto",
    *,
    device_type: str = "cpu",
    block_size: int = 16,
    dtype: torch.dtype | None = None,
    quantization: Quantization | None = None,
    quantized_cache: bool = False,
) -> Backend:
    """The backend of this name.

    Args:
        quantization: ``int8`` keeps the weights of the layers as 8-bit whole numbers with a scale for each output.
        quantized_cache: the KV cache will hold 8-bit codes, which flash_attn cannot read.

    ``auto`` on a CPU is the C kernels, or torch where they are not installed; on a GPU ("cuda") it is flash_attn where
    that is installed and takes these blocks, else Triton, or torch where Triton is not installed.

    Raises:
        UnknownBackend, NotBuilt, NoTriton, NoFlashAttn, NoQuantization
        NoSuchFamily: PDSERVE_CPU_ISA names one that the machine lacks.
    """
    if name not in _BACKENDS:
        raise UnknownBackend(name, sorted(_BACKENDS))
    if quantized_cache:
        _check_quantized_cache(name, device_type, dtype)
    if quantization is not None:
        return _with_int8(name, device_type, dtype)
    if name == "auto" and device_type == "cuda":
        return _auto_on_gpu(block_size, None if quantized_cache else dtype)
    return _BACKENDS[name]()
