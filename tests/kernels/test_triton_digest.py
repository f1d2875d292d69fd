"""The digest of landed bytes: the same in numpy and in Triton's interpreter, and what it notices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pdserve_kernels.digest import lanes_digest

pytest.importorskip("triton")

from pdserve_kernels.triton_gpu.digest import copy_and_digest, digests_of


def some_bytes(rows: int, size: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (rows, size), dtype=np.uint8)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_known_values():
    """Frozen: two nodes of different versions must agree."""
    assert lanes_digest(np.zeros(4, dtype=np.uint8)).hex() == "8b3569c16fa9296c4a663013558cc726"
    assert lanes_digest(np.arange(64, dtype=np.uint8)).hex() == "e051af95a8ac0a3dac9683a25868dc1c"


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 400, 4 * 5000])
def test_both_sides_agree(size):
    data = some_bytes(5, size)
    sums = copy_and_digest(torch.from_numpy(data).view(torch.int32), ints(4, 0, 2))
    assert digests_of(sums) == [lanes_digest(data[row]) for row in (4, 0, 2)]


def test_what_is_copied_is_what_is_digested():
    source, target = some_bytes(4, 20_000), np.zeros((6, 20_000), dtype=np.uint8)
    words = [torch.from_numpy(array).view(torch.int32) for array in (source, target)]
    sums = copy_and_digest(words[0], ints(3, 1), words[1], ints(5, 0))
    expected = np.zeros_like(target)
    expected[[5, 0]] = source[[3, 1]]
    assert np.array_equal(target, expected)
    assert digests_of(sums) == [lanes_digest(expected[5]), lanes_digest(expected[0])]


def test_accidents_show():
    """A flipped bit, swapped words, a tail that has not arrived, zeros, words moved by one."""
    good = some_bytes(1, 4096)[0]
    words = good.view(np.uint32)
    swapped, moved = words.copy(), np.roll(words, 1)
    swapped[[10, 900]] = swapped[[900, 10]]
    flipped, torn = good.copy(), good.copy()
    flipped[1234] ^= 8
    torn[2048:] = 0
    accidents = [flipped, torn, np.zeros_like(good), swapped.view(np.uint8), moved.view(np.uint8)]
    digests = {lanes_digest(data) for data in [good, *accidents]}
    assert len(digests) == 6


def test_every_lane_notices_a_changed_word():
    good = some_bytes(1, 256)[0]
    lanes = np.frombuffer(lanes_digest(good), dtype=np.uint32)
    for place in range(0, 256, 17):
        changed = good.copy()
        changed[place] += 1
        assert (np.frombuffer(lanes_digest(changed), dtype=np.uint32) != lanes).all()
