"""What a source and a target of the tcp connector say to each other: proofs first, then writes and acknowledgements.

A connection is to one region. Each side proves, for nonces that are fresh, that it knows the region's token and the
cluster key, before a byte of anything else is read: the token travels in the region's metadata, over the nodes' doors.

    source                                           target
    Hello(region, slot size, nonce)      ──────────►
                                         ◄──────────  nonce, proof
    proof                                ──────────►
                                         ◄──────────  READY
    number, count, runs, bytes of blocks ──────────►
                                         ◄──────────  number, when all of it lies in its slots
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

HELLO = struct.Struct("<8s16sQ32s")
"""Magic, region, bytes of a slot, nonce."""
CHALLENGE = struct.Struct("<32s32s")
"""Nonce, proof."""
WRITE = struct.Struct("<QI")
"""Number of the write, number of its runs."""
RUN = struct.Struct("<II")
"""First slot, number of slots. The bytes of all runs follow, in this order."""
ACK = struct.Struct("<Q")
"""Number of a write that has landed."""

MAGIC = b"pdskv\0\0\1"
READY = b"ready\0\0\1"
ID_BYTES = 16
TOKEN_BYTES = NONCE_BYTES = PROOF_BYTES = 32

HANDSHAKE_S = 3.0
CLOSE_S = 5.0
BUFFERS_PER_CALL = 512
"""The kernel takes 1,024 at most."""


class TcpRegion(msgspec.Struct, frozen=True, tag="pdserve-tcp", array_like=True):
    """A region's metadata: where its node listens, and what proves that one was given it.

    Attributes:
        hosts: addresses to try, in this order.
        id: of the region.
        token: secret of the region.
    """

    hosts: list[str]
    port: int
    id: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Closed(Exception):
    """The other side has ended the connection, or is too slow, or is not what it should be."""


def region_key(token: bytes, cluster_key: str | None) -> bytes:
    """What both sides prove that they know; without a cluster key the token alone decides."""
    secret = (cluster_key or "").encode()
    return hashlib.blake2b(secret, digest_size=32, key=token, person=b"pdserve-kv-tcp").digest()


def proof(key: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    """Of ``side``, for this hello of the source and this nonce of the target."""
    return hmac.digest(key, side + hello + nonce, "sha256")


def prove_source(sock: socket.socket, region: TcpRegion, slot_bytes: int, key: bytes, deadline: float) -> None:
    """The source's part of the handshake.

    Raises:
        Closed: the other side is not the region's owner, or does not want us.
        OSError: the connection failed.
    """
    hello = HELLO.pack(MAGIC, region.id, slot_bytes, secrets.token_bytes(NONCE_BYTES))
    sock.sendall(hello)
    nonce, theirs = CHALLENGE.unpack(receive(sock, CHALLENGE.size, deadline))
    if not hmac.compare_digest(theirs, proof(key, b"target", hello, nonce)):
        raise Closed("who listens there is not the owner of this region, or has another cluster key")
    sock.sendall(proof(key, b"source", hello, nonce))
    if receive(sock, len(READY), deadline) != READY:
        raise Closed("its owner does not take the connection")


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection for bulk, whose calls time out after ``timeout_s``.

    Within a host there is nothing that could be congested: control that paces what it sends, as BBR does, would halve
    the bandwidth there. Between hosts it is the operator's choice.

    Raises:
        OSError, OverflowError, ValueError: nobody there, or not the name of a host, or not a port.
    """
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sock.getsockname()[0] == sock.getpeername()[0] and hasattr(socket, "TCP_CONGESTION"):
            with suppress(OSError):  # A system may not have it.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    except OSError:
        sock.close()
        raise
    return sock


def receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly ``size`` bytes, by then.

    Raises:
        Closed: the connection has ended before.
        OSError: it failed, or the deadline has passed.
    """
    data = bytearray()
    while len(data) < size:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = sock.recv(size - len(data))
        if not piece:
            raise Closed("the connection ended")
        data += piece
    sock.settimeout(None)
    return bytes(data)


def write_header(number: int, spans: Sequence[tuple[int, int, int]]) -> bytes:
    """Of a write of (block, slot, length) runs."""
    return WRITE.pack(number, len(spans)) + b"".join(RUN.pack(slot, length) for _, slot, length in spans)


def shut(sock: socket.socket) -> None:
    """Ends a connection under the threads that wait for it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It has ended already.
        return
