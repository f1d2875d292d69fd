"""The backend for CPUs, in C: products at the speed of memory for few rows and of the arithmetic units for many.

Owns the C sources (csrc/) and what lies between them and tensors. An installation without a compiler lacks the
extension; ``is_built`` says so.

    backend.py     CpuBackend: the interface over the C kernels
    packing.py     weights in panels, in memory of large pages
    layout.py      the structs that C reads
    sampling.py    one token of a row of logits
    memory.py      what memory gives a core: read_bandwidth
    csrc/          kernels.h is the place to begin
"""

from __future__ import annotations

from importlib.util import find_spec


def is_built() -> bool:
    """Whether the extension is installed."""
    return find_spec("pdserve_kernels.cpu._native") is not None
