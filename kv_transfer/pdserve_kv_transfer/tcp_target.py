"""The half of the tcp connector that is written to: one port, and one receiving thread for each connection."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pdserve_kv_transfer.errors import ConnectorMissing, RegionUnusable
from pdserve_kv_transfer.interfaces import interfaces
from pdserve_kv_transfer.tcp_wire import (
    ACK,
    BUFFERS_PER_CALL,
    CHALLENGE,
    CLOSE_S,
    HANDSHAKE_S,
    HELLO,
    ID_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    READY,
    RUN,
    TOKEN_BYTES,
    WRITE,
    Closed,
    TcpRegion,
    proof,
    receive,
    region_key,
    shut,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pdserve_kv_transfer.connector import Network

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 64
MAX_CONNECTIONS = 8
"""To one region: a source has one, and makes another only when it has lost that."""


class TcpTarget:
    """One port for all regions."""

    def __init__(self, network: Network) -> None:
        try:
            family, _, _, _, where = socket.getaddrinfo(network.host, 0, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(where[:2], family=family, backlog=MAX_HANDSHAKES)
        except OSError as error:
            raise ConnectorMissing("tcp", f"cannot listen on {network.host}: {error}") from error
        self._network = network
        self._hosts = _hosts_of(network)
        self._regions: dict[bytes, _Region] = {}
        self._ids: dict[str, bytes] = {}
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kv-tcp-target", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def open_region(self, name: str, memory_SB: npt.NDArray[np.uint8]) -> bytes:
        if self._closing.is_set():
            raise RegionUnusable(name, "the connector is closed")
        id, token = secrets.token_bytes(ID_BYTES), secrets.token_bytes(TOKEN_BYTES)
        self._regions[id] = _Region(name, memory_SB, region_key(token, self._network.cluster_key))
        self._ids[name] = id
        return msgspec.msgpack.encode(TcpRegion(self._hosts, self.port, id, token))

    def fence(self, name: str) -> None:
        """As the contract says, and more: when this returns, no later write reaches the memory."""
        region = self._regions.pop(self._ids.pop(name, b""), None)
        if region is not None:
            region.fence()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        for name in list(self._ids):
            self.fence(name)
        shut(self._listener)
        self._thread.join(CLOSE_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    # No more files, for example. The pause keeps this from spinning until there are some again.
                    log.warning("a KV connection could not be accepted: %s", error)
                    self._closing.wait(0.1)
                continue
            if not self._handshakes.acquire(blocking=False):
                log.warning("%d KV connections are in their handshake; another one is dropped", MAX_HANDSHAKES)
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="kv-tcp-region", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """A connection, from its first byte to its end."""
        connection = _Incoming(sock, threading.current_thread())
        with sock:
            try:
                try:
                    region = self._shake_hands(connection)
                finally:
                    self._handshakes.release()
                region.serve(connection)
            except (OSError, Closed) as error:
                log.warning("a KV connection ends: %s", error)

    def _shake_hands(self, connection: _Incoming) -> _Region:
        """The region that the source has proved to have been given."""
        sock, deadline = connection.sock, time.monotonic() + HANDSHAKE_S
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = receive(sock, HELLO.size, deadline)
        magic, id, slot_bytes, _ = HELLO.unpack(hello)
        region = self._regions.get(id)
        if magic != MAGIC or region is None or slot_bytes != region.slot_bytes:
            raise Closed("what came is no hello to a region that is here")
        nonce = secrets.token_bytes(NONCE_BYTES)
        sock.sendall(CHALLENGE.pack(nonce, proof(region.key, b"target", hello, nonce)))
        theirs = receive(sock, PROOF_BYTES, deadline)
        if not hmac.compare_digest(theirs, proof(region.key, b"source", hello, nonce)):
            raise Closed("the source does not know the region's token and the cluster key")
        return region


@dataclass(eq=False, slots=True)
class _Incoming:
    """A connection to here and the thread that serves it."""

    sock: socket.socket
    thread: threading.Thread


@dataclass(eq=False, slots=True)
class _Region:
    """Memory that proved connections write. ``serve`` runs on their threads, ``fence`` on the target's."""

    name: str
    memory_SB: npt.NDArray[np.uint8]
    key: bytes
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _connections: set[_Incoming] = field(default_factory=set)
    _fenced: bool = False

    @property
    def slot_bytes(self) -> int:
        return int(self.memory_SB.shape[1])

    def serve(self, connection: _Incoming) -> None:
        """Lands writes until the connection ends.

        Raises:
            Closed: what came is no write, or leaves the region.
            OSError: the connection failed.
        """
        with self._lock:
            if self._fenced or len(self._connections) >= MAX_CONNECTIONS:
                raise Closed(f"region {self.name} is fenced or has {MAX_CONNECTIONS} connections")
            self._connections.add(connection)
        try:
            connection.sock.sendall(READY)
            while self._land(connection.sock):
                pass
        finally:
            with self._lock:
                self._connections.discard(connection)

    def fence(self) -> None:
        """When it returns, nobody writes into the memory any more."""
        with self._lock:
            self._fenced = True
            connections = list(self._connections)
        for connection in connections:
            shut(connection.sock)
        for connection in connections:
            connection.thread.join(CLOSE_S)
            if connection.thread.is_alive():
                log.error("a connection to the fenced region %s has not ended in %g s", self.name, CLOSE_S)

    def _land(self, sock: socket.socket) -> bool:
        """One write; False if the source has closed the connection between two."""
        header = bytearray(WRITE.size)
        if not self._fill(sock, [memoryview(header)], between=True):
            return False
        number, num_runs = WRITE.unpack(header)
        num_slots = len(self.memory_SB)
        if not 0 < num_runs <= num_slots:
            raise Closed(f"a write of {num_runs} runs into region {self.name} of {num_slots} slots")
        table = bytearray(num_runs * RUN.size)
        self._fill(sock, [memoryview(table)])
        memory, size = self.memory_SB.reshape(-1).data, self.slot_bytes
        buffers = []
        for slot, length in RUN.iter_unpack(table):
            if not 0 < length <= num_slots - slot:
                raise Closed(f"a write to slots {slot} to {slot + length} of region {self.name} of {num_slots} slots")
            buffers.append(memory[slot * size : (slot + length) * size])
        self._fill(sock, buffers)
        sock.sendall(ACK.pack(number))
        return True

    def _fill(self, sock: socket.socket, buffers: list[memoryview], *, between: bool = False) -> bool:
        """Receives until all buffers are full; False at an end before the first, ``between`` writes."""
        first, got = 0, 0
        while first < len(buffers):
            if self._fenced:
                raise Closed(f"region {self.name} is fenced")
            received, _, _, _ = sock.recvmsg_into(buffers[first : first + BUFFERS_PER_CALL], 0, socket.MSG_WAITALL)
            if not received:
                if between and not got:
                    return False
                raise Closed(f"the source of region {self.name} has gone in the middle of a write")
            got += received
            while first < len(buffers) and received >= len(buffers[first]):
                received -= len(buffers[first])
                first += 1
            if received:
                buffers[first] = buffers[first][received:]
        return True


def _hosts_of(network: Network) -> list[str]:
    """Where a source finds this machine."""
    if network.advertise_host is not None:
        return [network.advertise_host]
    address = socket.getaddrinfo(network.host, 0, type=socket.SOCK_STREAM)[0][4][0]
    if not ipaddress.ip_address(str(address).partition("%")[0]).is_unspecified:
        return [str(address)]
    # A source that finds somebody else under one of these learns it from the handshake, and tries the next.
    found = sorted(interfaces(), key=lambda one: (one.is_loopback, one.is_link_local, one.version))
    return [str(one) for one in found]
