"""A backend by its name."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from pdserve_kernels import cpu, triton_gpu
from pdserve_kernels.errors import NotBuilt, NoTriton, UnknownBackend
from pdserve_kernels.torch_backend import TorchBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve_kernels.interface import Backend

FAMILY_VARIABLE = "PDSERVE_CPU_ISA"
"""Environment variable that forces an instruction family: amx, avx512, avx2 or portable."""

log = logging.getLogger(__name__)


def _cpu() -> Backend:
    if not cpu.is_built():
        raise NotBuilt
    from pdserve_kernels.cpu.backend import CpuBackend

    return CpuBackend(os.environ.get(FAMILY_VARIABLE) or None)


def _auto() -> Backend:
    if cpu.is_built():
        return _cpu()
    log.warning("the C kernels are not installed; torch computes instead, at about half the speed")
    return TorchBackend()


def _triton() -> Backend:
    if not triton_gpu.is_installed():
        raise NoTriton("triton is not installed (the extra `cuda`)")
    from pdserve_kernels.triton_gpu.backend import TritonBackend

    return TritonBackend()


_BACKENDS: dict[str, Callable[[], Backend]] = {"auto": _auto, "cpu": _cpu, "torch": TorchBackend, "triton": _triton}


def select_backend(name: str = "auto") -> Backend:
    """The backend of this name; ``auto`` is the C kernels, or torch where they are not installed.

    Raises:
        UnknownBackend, NotBuilt, NoTriton
        NoSuchFamily: PDSERVE_CPU_ISA names one that the machine lacks.
    """
    if name not in _BACKENDS:
        raise UnknownBackend(name, sorted(_BACKENDS))
    return _BACKENDS[name]()
