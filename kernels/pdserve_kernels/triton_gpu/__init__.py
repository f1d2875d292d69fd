"""Kernels for GPUs in Triton, an optional dependency: importing this package alone does not import it.

backend.py      TritonBackend: the interface over the kernels
attention.py    paged attention, decode and prefill chunks in one kernel
rope.py         norms of q and k, RoPE, keys and values into the cache
codes.py        8-bit codes of a quantized cache
norm.py         RMSNorm with the residual
activation.py   SiLU of the gate, times up
digest.py       digests of blocks, alone or on the way of a copy
landing.py      landed blocks into blocks of the cache, converted on the way
launch.py       what the launches have in common
check.py        on a CUDA machine: every kernel against the reference, and its time against the memory floor
"""

from __future__ import annotations

import importlib.util


def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
