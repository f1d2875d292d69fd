"""The device that a worker computes on, and what is peculiar to CUDA: memory that is left, and captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from pdserve_engine.errors import NoCudaDevice

if TYPE_CHECKING:
    from collections.abc import Callable

Device = Literal["auto", "cpu", "cuda"]

_WARM_UPS = 2


def find_device(name: Device) -> torch.device:
    """``auto`` is the first CUDA device where torch sees one, else the CPU.

    Raises:
        NoCudaDevice
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoCudaDevice
    return torch.device("cuda", torch.cuda.current_device())


def free_device_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that nobody has taken."""
    return torch.cuda.mem_get_info(device)[0]


class CudaCapture:
    """Captures CUDA graphs that share one pool of memory; see decode_graphs.Capture. One at a time may be replayed.

    While a graph is captured, no other thread may use CUDA.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        self._stream.wait_stream(torch.cuda.current_stream())
        # What happens but once must not happen in the capture: kernels are compiled, cuBLAS takes its workspace.
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):
            result = run()
        self._graphs.append(graph)
        return result, graph.replay
