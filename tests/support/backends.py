"""Every kernel backend that this machine can run: torch, C for each instruction family it has, Triton interpreted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_kernels import cpu, triton_gpu
from pdserve_kernels.torch_backend import TorchBackend

if TYPE_CHECKING:
    from pdserve_kernels.interface import Backend


def families() -> list[str]:
    """Instruction families of the machine, best first; none where the C kernels are not built."""
    if not cpu.is_built():
        return []
    from pdserve_kernels.cpu import _native

    return _native.families()


BACKENDS = ["torch", *(f"cpu-{family}" for family in families()), *(["triton"] if triton_gpu.is_installed() else [])]


def make_backend(name: str) -> Backend:
    if name == "torch":
        return TorchBackend()
    if name == "triton":
        from pdserve_kernels.triton_gpu.backend import TritonBackend

        return TritonBackend()
    from pdserve_kernels.cpu.backend import CpuBackend

    return CpuBackend(name.removeprefix("cpu-"))
