"""The digest of a KV block, the same on both sides of a transfer. Against accidents, not against attackers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DIGEST_NAME = "xxh3-128"


def block_digest(block_B: npt.NDArray[np.uint8]) -> bytes:
    """16 bytes over the bytes of one block, contiguous uint8 [block_bytes]."""
    return xxhash.xxh3_128_digest(block_B.data)
