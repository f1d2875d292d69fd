"""Packing and landing of one block: from cache bytes to wire bytes and back, verified on the way.

Knows caches and buffers as bytes, one link's Wire and its seal. Where slots are, who may write them and when is others'
business. Plain blocks are not copied to be sent, and are copied once to land.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pdserve_kernels.kv_blocks import Conversion

from pdserve_kv_transfer.cache_memory import host_blocks
from pdserve_kv_transfer.digest import block_digest, copy_block_digest
from pdserve_kv_transfer.errors import SealKeyMissing
from pdserve_kv_transfer.seal import Seal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pdserve_kv_transfer.cache_memory import Cache
    from pdserve_kv_transfer.spans import CopyRun
    from pdserve_kv_transfer.wire import Wire

    Bytes = npt.NDArray[np.uint8]


def label_of(id: str, position: int) -> bytes:
    """What a seal is bound to beside the bytes: the hand-off and the position."""
    return f"{id}/{position}".encode()


class Packer:
    """The sending side of a link.

    Args:
        cache_NB: the KV cache, uint8 [num_blocks, block_bytes], on the host or on a device.
        wire: None for the bytes of the cache as they are, digested.
        region: name of the landing region.
        secret: the cluster key; wanted for a sealed wire.

    Raises:
        SealKeyMissing: the wire is sealed and there is no secret.

    Attributes:
        is_staged: what travels is not the cache's own bytes: ``pack`` needs a buffer.
    """

    def __init__(self, cache_NB: Cache, wire: Wire | None, region: str = "", secret: str | None = None) -> None:
        self._blocks = host_blocks(cache_NB)
        self._seal = _seal_of(wire, region, secret)
        self._digest = wire.digest if wire is not None else None
        self._conversion: Conversion | None = None
        self._tokens = 0
        self.slot_bytes = slot_bytes_of(cache_NB, wire)
        if wire is not None and wire.is_packed:
            self._conversion = Conversion(wire.source_rows, wire.wire_rows, wire.extents)
            self._tokens = wire.source.block_size
        self._plain_B = np.empty(self.slot_bytes if self._seal and self._conversion else 0, dtype=np.uint8)
        self.is_staged = self._seal is not None or self._conversion is not None or not self._blocks.in_place

    def pack(self, block: int, id: str, position: int, staging_B: Bytes | None) -> bytes:
        """Makes what travels for one block, in ``staging_B`` if this packer is staged; returns the tag of ``land``.

        The tag is taken before the write: whatever happens to the bytes after shows as a mismatch at the receiver.
        """
        is_plain = self._seal is None and self._conversion is None
        wire_B = self._blocks.read(block, staging_B if is_plain else None)
        if self._conversion is not None:
            assert staging_B is not None, "a staged packer needs a buffer"
            converted_B = self._plain_B if self._seal else staging_B
            self._conversion.run(wire_B, converted_B, 0, 0, self._tokens)
            wire_B = converted_B
        if self._seal is not None:
            assert staging_B is not None, "a staged packer needs a buffer"
            return self._seal.seal(wire_B, staging_B, label_of(id, position))
        return block_digest(wire_B, self._digest)


class Lander:
    """The receiving side of a link; its arguments are those of Packer.

    A slot may change at any moment, so it is read once, into memory that the peer cannot reach, and what was read is
    what is verified and used. Where nothing is converted that memory is the cache block itself, which nobody uses
    before it is verified, and which is wiped if it is not.
    """

    def __init__(self, cache_NB: Cache, wire: Wire | None, region: str = "", secret: str | None = None) -> None:
        self._blocks = host_blocks(cache_NB)
        self._seal = _seal_of(wire, region, secret)
        self._digest = wire.digest if wire is not None else None
        self._conversion: Conversion | None = None
        self._tokens = 0
        self.slot_bytes = slot_bytes_of(cache_NB, wire)
        if wire is not None:
            self._tokens = wire.source.block_size
            if wire.is_converted:
                self._conversion = Conversion(wire.wire_rows, wire.target_rows, wire.extents)
        self._copy_B = np.empty(self.slot_bytes if self._seal or self._conversion else 0, dtype=np.uint8)
        self._plain_B = np.empty(self.slot_bytes if self._seal and self._conversion else 0, dtype=np.uint8)

    def land(self, slot_B: Bytes, tag: bytes, id: str, position: int, target: int | Sequence[CopyRun]) -> bool:
        """Verifies the slot against its tag and copies it into the cache; if it is not what was sent, nothing is there.

        Args:
            target: the cache block that takes all of it, or the runs of tokens that go to cache blocks.
        """
        if self._conversion is None:
            assert isinstance(target, int), "runs need a conversion"
            block_B = self._blocks.blank(target)
            verified = self._read(slot_B, block_B, tag, id, position)
            if not verified:
                block_B[:] = 0
            self._blocks.store(target)
            return verified
        plain_B = self._plain_B if self._seal is not None else self._copy_B
        if not self._read(slot_B, plain_B, tag, id, position):
            return False
        if isinstance(target, int):
            self._conversion.run(plain_B, self._blocks.blank(target), 0, 0, self._tokens)
            self._blocks.store(target)
            return True
        for block, source_token, target_token, num_tokens in target:
            self._conversion.run(plain_B, self._blocks.read(block), source_token, target_token, num_tokens)
            self._blocks.store(block)
        return True

    def _read(self, slot_B: Bytes, plain_B: Bytes, tag: bytes, id: str, position: int) -> bool:
        """Copies the slot out of reach, and out of its seal; whether it is what was sent."""
        if self._seal is None:
            return copy_block_digest(slot_B, plain_B, self._digest) == tag
        np.copyto(self._copy_B, slot_B)
        return self._seal.unseal(self._copy_B, plain_B, tag, label_of(id, position))


def slot_bytes_of(cache_NB: Cache, wire: Wire | None) -> int:
    """Bytes of a block on the wire."""
    return int(cache_NB.shape[1]) if wire is None else wire.slot_bytes


def _seal_of(wire: Wire | None, region: str, secret: str | None) -> Seal | None:
    if wire is None or not wire.sealed:
        return None
    if secret is None:
        raise SealKeyMissing
    return Seal(secret, wire.context + b"/" + region.encode())
