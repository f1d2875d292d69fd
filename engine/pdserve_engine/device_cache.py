"""The KV cache of a GPU as bytes that a mover copies to and from the host; see kv_transfer's DeviceCache.

A copy takes what PCIe takes, for page-locked memory some 50 GB/s (PCIe 5), and a wait of some 10 microseconds; it runs
on a stream of its own beside the steps. Nothing orders it after a step: the steps that write a block have ended before
it is sent, and no step uses a block before it has landed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from pdserve_kv_transfer.errors import CannotPin

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class TorchDeviceCache:
    """``blocks_NB``: uint8 [num_blocks, block_bytes], contiguous."""

    def __init__(self, blocks_NB: torch.Tensor) -> None:
        self._blocks_NB = blocks_NB
        self.shape = (self._blocks_NB.shape[0], self._blocks_NB.shape[1])
        self._on_cuda = blocks_NB.device.type == "cuda"
        self.scratch_B: npt.NDArray[np.uint8] = torch.empty(
            self.shape[1], dtype=torch.uint8, pin_memory=self._on_cuda
        ).numpy()
        self._stream = torch.cuda.Stream(blocks_NB.device) if self._on_cuda else None  # type: ignore[no-untyped-call]

    def read(self, block: int, into_B: npt.NDArray[np.uint8]) -> None:
        self._copy(torch.from_numpy(into_B), self._blocks_NB[block])

    def write(self, block: int, from_B: npt.NDArray[np.uint8]) -> None:
        self._copy(self._blocks_NB[block], torch.from_numpy(from_B))

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Raises CannotPin."""
        if not self._on_cuda:
            return
        status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(status) != 0:
            raise CannotPin(memory.nbytes, str(status))

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with self._ordered():
            to.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _ordered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
