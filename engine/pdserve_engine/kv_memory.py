"""Memory of the KV cache: how much, and where it comes from.

On a CPU the cache is one anonymous mapping: page-aligned, zero, and without physical pages until a block is first
written, so that a large cache costs little at start-up. A node has some made before it takes requests. On a GPU it is
one allocation.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from pdserve_kernels.quantized_cache import codes_of
from pdserve_kv_transfer.pages import populate
from pdserve_protocol.node import SCALED_KV_DTYPES

from pdserve_engine.errors import NoRoomForCache

if TYPE_CHECKING:
    import numpy.typing as npt
    from pdserve_protocol.node import KVLayout

    from pdserve_engine.config import CacheConfig

_DEFAULT_SHARE = 4
_DEFAULT_LIMIT = 4 << 30
_DEVICE_SHARE = 0.85
_PAGES_AHEAD = 1 << 30
_PIECE = 64 << 20
_SPARE = 4 << 30
_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def num_blocks(config: CacheConfig, layout: KVLayout, *, device_memory: int | None = None) -> int:
    """Blocks that the configured memory holds; by default a quarter of free memory, 4 GiB at most.

    Args:
        device_memory: bytes that are free on the GPU that the cache lies on, once the weights are there: 85 % of them
            by default, since activations and graphs need some as well.

    Raises:
        NoRoomForCache: not even one.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    memory_bytes = config.memory_bytes
    if memory_bytes is None:
        if device_memory is not None:
            memory_bytes = int(device_memory * _DEVICE_SHARE)
        else:
            memory_bytes = min(free_memory() // _DEFAULT_SHARE, _DEFAULT_LIMIT)
    count = memory_bytes // layout.block_bytes
    if count < 1:
        raise NoRoomForCache(memory_bytes, layout.block_bytes)
    return count


def allocate(count: int, layout: KVLayout) -> npt.NDArray[np.uint8]:
    """Zeroed bytes [count, block_bytes]. The mapping lives as long as an array or tensor over it."""
    mapping = mmap.mmap(-1, count * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Attention reads a few KB here and there: with small pages it waits for their addresses as long as for them.
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8).reshape(count, layout.block_bytes)


def make_pages(blocks_NB: npt.NDArray[np.uint8]) -> None:
    """Makes the pages of the first GiB of ``blocks_NB``, bytes of ``allocate``, and none once less than 4 GiB are free.

    Without it the first prompts make them, and wait. Takes 0.1 s, and some seconds on a virtual machine that has never
    used the memory.
    """
    ahead_B = blocks_NB.reshape(-1)[:_PAGES_AHEAD]
    for start in range(0, ahead_B.nbytes, _PIECE):
        if free_memory() < _SPARE or not populate(ahead_B[start : start + _PIECE]):
            return


def allocate_on(device: torch.device, count: int, layout: KVLayout) -> torch.Tensor:
    """Zeroed bytes [count, block_bytes] on a GPU."""
    return torch.zeros(count, layout.block_bytes, dtype=torch.uint8, device=device)


def as_tensor(blocks_NB: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """The same memory as [num_blocks, kv_heads, layers, 2, block_size, head_dim], whatever the order of the layout; see
    kernels' quantized_cache.py where it has scales.
    """
    if layout.dtype in SCALED_KV_DTYPES:
        cache = codes_of(blocks_NB, _CODES[layout.dtype], layout.shape)
    else:
        cache = blocks_NB.view(getattr(torch, layout.dtype)).view(-1, *layout.shape)
    return cache.permute(0, *(1 + layout.order.index(axis) for axis in "GL2SD"))


def free_memory() -> int:
    """Bytes that can be had without swapping: what the machine has available, within the limit of the container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(int(text) - int(used.read_text()), 0))
    return available
