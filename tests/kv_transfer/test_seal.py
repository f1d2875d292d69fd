"""Sealed blocks: opened by the right link, at the right place, once sealed; and by nobody else."""

from __future__ import annotations

import numpy as np
import pytest
from pdserve_kv_transfer.codec import Lander, Packer
from pdserve_kv_transfer.errors import SealKeyMissing
from pdserve_kv_transfer.seal import NONCE_BYTES, SEAL_BYTES, Seal
from pdserve_kv_transfer.wire import agree
from support.handoff_world import identity
from support.movers import cache_of

SIZE = 5000


def sealed_block(seal: Seal, label: bytes = b"id/0") -> tuple[np.ndarray, np.ndarray, bytes]:
    plain, sealed = cache_of(1, SIZE, seed=3)[0], np.zeros(SIZE, dtype=np.uint8)
    return plain, sealed, seal.seal(plain, sealed, label)


def test_a_sealed_block_is_opened_by_the_other_end() -> None:
    plain, sealed, tag = sealed_block(Seal("key", b"link"))
    opened = np.zeros(SIZE, dtype=np.uint8)
    assert len(tag) == SEAL_BYTES
    assert not np.array_equal(sealed, plain)
    assert Seal("key", b"link").unseal(sealed, opened, tag, b"id/0")
    assert np.array_equal(opened, plain)


@pytest.mark.parametrize(
    ("secret", "context", "label"),
    [("other", b"link", b"id/0"), ("key", b"link2", b"id/0"), ("key", b"link", b"id/16")],
)
def test_another_key_link_or_place_does_not_open_it(secret: str, context: bytes, label: bytes) -> None:
    _, sealed, tag = sealed_block(Seal("key", b"link"))
    assert not Seal(secret, context).unseal(sealed, np.zeros(SIZE, dtype=np.uint8), tag, label)


@pytest.mark.parametrize("where", ["block", "nonce", "tag", "short"])
def test_a_changed_byte_is_noticed(where: str) -> None:
    seal = Seal("key", b"link")
    _, sealed, tag = sealed_block(seal)
    if where == "block":
        sealed[4999] ^= 1
    elif where == "short":
        tag = tag[:-1]
    else:
        index = 0 if where == "nonce" else NONCE_BYTES
        tag = tag[:index] + bytes([tag[index] ^ 1]) + tag[index + 1 :]
    assert not seal.unseal(sealed, np.zeros(SIZE, dtype=np.uint8), tag, b"id/0")


def test_no_nonce_is_used_twice() -> None:
    # A receiver that names the same region twice makes the sender derive the same key; the nonces differ still.
    first, second = Seal("key", b"link"), Seal("key", b"link")
    nonces = {sealed_block(seal)[2][:NONCE_BYTES] for seal in (first, second) for _ in range(50)}
    assert len(nonces) == 100


def test_the_same_block_sealed_twice_differs() -> None:
    seal = Seal("key", b"link")
    assert not np.array_equal(sealed_block(seal)[1], sealed_block(seal)[1])


def test_regions_have_keys_of_their_own() -> None:
    nodes = identity("p", kv_encrypt=True), identity("d", kv_encrypt=True)
    wire = agree(*nodes)
    source, target = cache_of(2, wire.slot_bytes, seed=1), cache_of(2, wire.slot_bytes)
    slot = np.zeros(wire.slot_bytes, dtype=np.uint8)
    tag = Packer(source, wire, "region-a", "key").pack(1, "id", 0, slot)
    assert not Lander(target, wire, "region-b", "key").land(slot, tag, "id", 0, 0)
    # The two directions between two nodes are apart too.
    assert not Lander(target, agree(*reversed(nodes)), "region-a", "key").land(slot, tag, "id", 0, 0)
    assert Lander(target, wire, "region-a", "key").land(slot, tag, "id", 0, 0)
    assert np.array_equal(target[0], source[1])


def test_without_a_cluster_key_nothing_is_sealed() -> None:
    wire = agree(identity("p", kv_encrypt=True), identity("d", kv_encrypt=True))
    with pytest.raises(SealKeyMissing, match="cluster-key"):
        Packer(cache_of(2, wire.slot_bytes), wire, "r", None)
