"""Anonymous memory in large pages, where the system has them, and when its pages are made.

The kernel pins the pages of a buffer for each write from another process, one after the other: with small ones that
takes as long as the copy itself. A page that is first written to costs as well: on a virtual machine, whose host has to
find memory too, several ms for each 2 MB.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

import numpy as np

from pdserve_kv_transfer.errors import NoMemory

if TYPE_CHECKING:
    import numpy.typing as npt

LARGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_large(num_bytes: int) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    """A mapping of its own, and ``num_bytes`` zeros in it that begin at a large page. No page exists yet.

    Raises:
        NoMemory: the system gives none.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise NoMemory(num_bytes, str(error)) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole_B = np.frombuffer(mapping, dtype=np.uint8)
    offset = -whole_B.ctypes.data % LARGE_PAGE_BYTES
    return mapping, whole_B[offset : offset + num_bytes]


def populate(memory: npt.NDArray[np.uint8]) -> bool:
    """Makes the pages of memory that may never have been written to, and changes none of its bytes.

    False where the kernel cannot: it makes them at the first write, as it would have anyway.
    """
    start = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return not _libc.madvise(start, memory.ctypes.data + memory.nbytes - start, _MADV_POPULATE_WRITE)
