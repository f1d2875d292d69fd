"""Identity of full KV blocks: a chained keyed hash of everything that decides their content.

Owns how a block is named. Knows nothing of where blocks are.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve_engine.request import Request

HASH_BYTES = 16


class BlockHasher:
    """Names blocks by keyed BLAKE2b-128 over (model identity, cache salt, KV origin, hash of the block before, tokens).

    The key is secret to the process, so that nobody can make two prompts with the same name.

    Args:
        model_id: hash of configuration and weights.
        key: at most 64 bytes.
    """

    def __init__(self, model_id: str, block_size: int, key: bytes) -> None:
        self.block_size = block_size
        self._key = key
        self._model_id = model_id.encode()

    def extend(self, request: Request, num_blocks: int) -> list[bytes]:
        """Hashes of the first ``num_blocks`` blocks of the request, all of them full; each is computed once."""
        hashes = request.block_hashes
        size = self.block_size
        while len(hashes) < num_blocks:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else self._root(request)
            token_ids = request.token_ids(start, start + size)
            assert len(token_ids) == size, "only full blocks have a hash"
            hashes.append(self._digest(b"block", parent + struct.pack(f"<{size}I", *token_ids)))
        return hashes[:num_blocks]

    def _root(self, request: Request) -> bytes:
        parts = (self._model_id, request.kv_origin.encode(), request.cache_salt.encode())
        return self._digest(b"root", b"".join(struct.pack("<I", len(part)) + part for part in parts))

    def _digest(self, purpose: bytes, data: bytes) -> bytes:
        return blake2b(data, digest_size=HASH_BYTES, key=self._key, person=purpose).digest()
