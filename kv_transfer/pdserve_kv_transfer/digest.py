"""The digest of a KV block, the same on both sides of a transfer. Against accidents, not against attackers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_kernels.kv_blocks import copy_digest, digest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DIGEST_NAME = "xxh3-128"

NO_DIGEST = "none"
"""For measurements: nothing is verified."""


def block_digest(block_B: npt.NDArray[np.uint8], name: str | None = None) -> bytes:
    """Over the bytes of one block, contiguous uint8 [block_bytes]; empty for NO_DIGEST."""
    return b"" if name == NO_DIGEST else digest(block_B)


def copy_block_digest(source_B: npt.NDArray[np.uint8], target_B: npt.NDArray[np.uint8], name: str | None) -> bytes:
    """Copies a block and digests the copy, whatever happens to the source meanwhile."""
    if name == NO_DIGEST:
        target_B[:] = source_B
        return b""
    return copy_digest(source_B, target_B)
