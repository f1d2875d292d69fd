"""A cache that a mover cannot reach in place, as that of a GPU: packing and landing go by way of the host."""

from __future__ import annotations

import numpy as np
import torch
from pdserve_engine.device_cache import TorchDeviceCache
from pdserve_kv_transfer.cache_memory import host_blocks
from pdserve_kv_transfer.codec import Lander, Packer
from support.movers import cache_of

BLOCK = 512


def device_cache(num_blocks: int, seed: int | None = None) -> tuple[np.ndarray, TorchDeviceCache]:
    """The same memory as an array and as a device's."""
    data = cache_of(num_blocks, BLOCK, seed)
    return data, TorchDeviceCache(torch.from_numpy(data))


def test_a_plain_block_is_packed_into_staging_and_lands():
    source, source_cache = device_cache(4, seed=1)
    target, target_cache = device_cache(4)
    packer, lander = Packer(source_cache, None), Lander(target_cache, None)
    assert packer.is_staged
    slot_B = np.zeros(BLOCK, dtype=np.uint8)
    tag = packer.pack(2, "id", 0, slot_B)
    assert np.array_equal(slot_B, source[2])
    assert tag == Packer(source, None).pack(2, "id", 0, None)
    assert lander.land(slot_B, tag, "id", 0, 3)
    assert np.array_equal(target[3], source[2])
    assert not target[:3].any()


def test_a_torn_block_leaves_nothing():
    _, source_cache = device_cache(4, seed=1)
    target, target_cache = device_cache(4, seed=2)
    slot_B = np.zeros(BLOCK, dtype=np.uint8)
    tag = Packer(source_cache, None).pack(0, "id", 0, slot_B)
    slot_B[7] ^= 1
    assert not Lander(target_cache, None).land(slot_B, tag, "id", 0, 1)
    assert not target[1].any()
    assert target[0].any()


def test_a_part_of_a_block_keeps_the_rest():
    data, cache = device_cache(2, seed=3)
    expected = data.copy()
    blocks = host_blocks(cache)
    assert not blocks.in_place
    blocks.read(1)[:10] = 7
    assert np.array_equal(data, expected)
    blocks.store(1)
    expected[1, :10] = 7
    assert np.array_equal(data, expected)
