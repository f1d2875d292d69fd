"""A digest of bytes that every processor computes alike: four sums of mixed words, in whatever order they are added.

A word of 32 bits is mixed with its place, then once more for each of four lanes, and each lane adds up modulo 2**32. A
single changed word changes every lane; any other accident passes a lane by a chance of 2**-32. Against accidents, not
against attackers. This is the reference, in numpy; triton_gpu/digest.py computes the same on a GPU, where a digest that
reads its bytes in order (xxh3) would leave all processors but one idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

NAME = "lanes-128"

NUM_LANES = 4
PLACE_FACTOR = 0x9E3779B1
WORD_FACTOR = 0x85EBCA6B
LANE_FACTORS = (0xC2B2AE35, 0x27D4EB2F, 0x165667B1, 0xD3A2646D)
"""Odd constants: the primes of xxHash and the mixers of MurmurHash3, and one more."""


def lanes_digest(data: npt.NDArray[np.uint8]) -> bytes:
    """16 bytes over contiguous uint8 [4 n]."""
    words = data.view(np.uint32)
    with np.errstate(over="ignore"):
        mixed = np.arange(1, words.size + 1, dtype=np.uint32)
        mixed *= np.uint32(PLACE_FACTOR)
        mixed ^= words
        mixed *= np.uint32(WORD_FACTOR)
        mixed ^= mixed >> np.uint32(15)
        lanes = np.empty(NUM_LANES, dtype="<u4")
        for lane, factor in enumerate(LANE_FACTORS):
            mixed_lane = mixed * np.uint32(factor)
            mixed_lane ^= mixed_lane >> np.uint32(16)
            lanes[lane] = mixed_lane.sum(dtype=np.uint32)
    return lanes.tobytes()
