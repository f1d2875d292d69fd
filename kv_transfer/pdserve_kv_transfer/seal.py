"""Seals KV blocks: AES-256-GCM under a key of one link.

Knows bytes and labels. The key is derived from the cluster key, both processes and the name of the landing region,
which is fresh for each link. A nonce is never used twice: it is a random number of this end of the link and a count of
its seals.
"""

from __future__ import annotations

import secrets
from itertools import count
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pdserve_kv_transfer.errors import SealSpent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NONCE_BYTES = 12
SEAL_BYTES = NONCE_BYTES + 16
_COUNT_BYTES = 4


class Seal:
    """One end of a link. The sender alone calls ``seal``.

    Args:
        secret: the cluster key.
        context: what no other link has, the same at both ends.
    """

    def __init__(self, secret: str, context: bytes) -> None:
        info = b"pdserve KV blocks\0" + context
        self._key = algorithms.AES(HKDF(SHA256(), length=32, salt=None, info=info).derive(secret.encode()))
        self._prefix = secrets.token_bytes(NONCE_BYTES - _COUNT_BYTES)
        self._counts = count(1)

    def seal(self, plain_B: npt.NDArray[np.uint8], sealed_B: npt.NDArray[np.uint8], label: bytes) -> bytes:
        """Encrypts into ``sealed_B``; returns nonce and tag, which ``unseal`` takes with the same label.

        Raises:
            SealSpent: the link has sealed 2**32 blocks.
        """
        number = next(self._counts)
        if number >> 8 * _COUNT_BYTES:
            raise SealSpent
        nonce = self._prefix + number.to_bytes(_COUNT_BYTES, "big")
        encryptor = Cipher(self._key, modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(label)
        encryptor.update_into(plain_B.data, sealed_B.data)
        encryptor.finalize()
        return nonce + encryptor.tag

    def unseal(self, sealed_B: npt.NDArray[np.uint8], plain_B: npt.NDArray[np.uint8], tag: bytes, label: bytes) -> bool:
        """Decrypts into ``plain_B``; False, with anything in it, if these are not the bytes that were sealed.

        ``sealed_B`` must not change meanwhile.
        """
        if len(tag) != SEAL_BYTES:
            return False
        mode = modes.GCM(tag[:NONCE_BYTES], tag[NONCE_BYTES:])
        decryptor = Cipher(self._key, mode).decryptor()
        decryptor.authenticate_additional_data(label)
        decryptor.update_into(sealed_B.data, plain_B.data)
        try:
            decryptor.finalize()
        except InvalidTag:
            return False
        return True
