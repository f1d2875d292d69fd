"""The writing half of the tcp connector: for each region one connection, and a thread that makes it and sends on it."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdserve_kv_transfer.errors import RegionUnreachable, RegionUnusable
from pdserve_kv_transfer.runs import runs
from pdserve_kv_transfer.tcp_wire import (
    ACK,
    BUFFERS_PER_CALL,
    CLOSE_S,
    HANDSHAKE_S,
    Closed,
    TcpRegion,
    connect,
    prove_source,
    region_key,
    shut,
    write_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from pdserve_protocol.handoff import Region

    from pdserve_kv_transfer.connector import Network


class TcpSource:
    """Writes are sent in order, by one thread for each peer."""

    def __init__(self, cache_NB: npt.NDArray[np.uint8], network: Network) -> None:
        self._cache = cache_NB.reshape(-1).data
        self._block_bytes = int(cache_NB.shape[1])
        self._network = network
        self._streams: dict[str, _Stream] = {}
        self._handles: dict[int, _Stream] = {}
        self._numbers = itertools.count(1)

    def connect(self, peer: str, region: Region) -> Future[None]:
        try:
            known = msgspec.msgpack.decode(region.metadata, type=TcpRegion)
        except msgspec.MsgspecError as error:
            raise RegionUnusable(region.name, f"it is not of the tcp connector: {error}") from error
        key = region_key(known.token, self._network.cluster_key)
        stream = _Stream(region.name, partial(_reach, known, self._block_bytes, key))
        self._streams[peer] = stream
        return stream.reached

    def write(self, peer: str, pieces: Sequence[tuple[int, int]]) -> int:
        stream = self._streams.get(peer)
        if stream is None:
            raise RegionUnreachable(peer, "it is not connected")
        spans = list(runs(pieces))
        number, size = next(self._numbers), self._block_bytes
        blocks = [self._cache[block * size : (block + length) * size] for block, _, length in spans]
        stream.send(number, [memoryview(write_header(number, spans)), *blocks])
        self._handles[number] = stream
        return number

    def poll(self, handle: int) -> bool:
        stream = self._handles[handle]
        try:
            ended = stream.has_landed(handle)
        except RegionUnreachable:
            del self._handles[handle]
            raise
        if ended:
            del self._handles[handle]
        return ended

    def abandon(self, handle: int) -> None:
        stream = self._handles.pop(handle, None)
        if stream is not None:
            stream.forget(handle)

    def disconnect(self, peer: str) -> None:
        stream = self._streams.pop(peer, None)
        if stream is not None:
            stream.close()

    def close(self) -> None:
        for peer in list(self._streams):
            self.disconnect(peer)
        self._handles.clear()


class _Stream:
    """One connection of a source. Used from the source's thread; ``_run`` is the sending thread, which makes it.

    Attributes:
        reached: ends when the region's owner has let us in, or with RegionUnreachable. Writes wait until then.
    """

    def __init__(self, region: str, reach: Callable[[], socket.socket]) -> None:
        self.reached: Future[None] = Future()
        self._reach = reach
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()
        self._region = region
        self._writes: queue.SimpleQueue[list[memoryview] | None] = queue.SimpleQueue()
        self._under_way: set[int] = set()
        self._landed: set[int] = set()
        self._unread = bytearray()
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._run, name="kv-tcp-source", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise RegionUnreachable(region, str(error)) from error

    def send(self, number: int, buffers: list[memoryview]) -> None:
        """Raises RegionUnreachable if the connection is known to have ended."""
        if self._fault is not None:
            raise RegionUnreachable(self._region, self._fault)
        self._under_way.add(number)
        self._writes.put(buffers)

    def has_landed(self, number: int) -> bool:
        """Raises RegionUnreachable when it never will; in both cases the number is forgotten."""
        if number not in self._landed and self._fault is None:
            self._read_acks()
        if number in self._landed:
            self._landed.remove(number)
            return True
        if self._fault is not None:
            self._under_way.discard(number)
            raise RegionUnreachable(self._region, self._fault)
        return False

    def forget(self, number: int) -> None:
        self._under_way.discard(number)
        self._landed.discard(number)

    def close(self) -> None:
        """Ends the connection, whatever is under way. A thread that still waits for the owner ends by itself."""
        self._end("it is disconnected")
        self._writes.put(None)
        if self._sock is not None:
            self._thread.join(CLOSE_S)
            self._sock.close()

    def _read_acks(self) -> None:
        if self._sock is None:
            return
        try:
            data = self._sock.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(str(error))
            return
        if not data:
            self._end("its owner has closed it")
            return
        self._unread += data
        whole = len(self._unread) - len(self._unread) % ACK.size
        for (number,) in ACK.iter_unpack(self._unread[:whole]):
            if number in self._under_way:
                self._under_way.remove(number)
                self._landed.add(number)
        del self._unread[:whole]

    def _run(self) -> None:
        try:
            sock = self._reach()
        except Closed as error:
            self._end(str(error))
            self.reached.set_exception(RegionUnreachable(self._region, str(error)))
            return
        with self._lock:
            fault = self._fault
            if fault is None:
                self._sock = sock
        if fault is not None:
            sock.close()
            self.reached.set_exception(RegionUnreachable(self._region, fault))
            return
        self.reached.set_result(None)
        while (buffers := self._writes.get()) is not None:
            try:
                _send_buffers(sock, buffers)
            except OSError as error:
                self._end(str(error))
                return

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._fault is None:
                self._fault = reason
            sock = self._sock
        if sock is not None:
            shut(sock)


def _reach(region: TcpRegion, block_bytes: int, key: bytes) -> socket.socket:
    """A connection to the region, proved on both sides, by the first address that has one.

    Raises:
        Closed: there is none, within ``HANDSHAKE_S``.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    reasons = []
    for host in region.hosts:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        try:
            sock = connect(host, region.port, remaining_s)
        except (OSError, OverflowError, ValueError) as error:
            # Nor need it be a host or a port: the peer has named them.
            reasons.append(f"{host}: {error}")
            continue
        try:
            prove_source(sock, region, block_bytes, key, deadline)
        except (OSError, Closed) as error:
            sock.close()
            reasons.append(f"{host}: {error}")
            continue
        return sock
    raise Closed("; ".join(reasons) or "it has no address")


def _send_buffers(sock: socket.socket, buffers: list[memoryview]) -> None:
    """All bytes of the buffers, as few calls as possible."""
    first = 0
    while first < len(buffers):
        sent = sock.sendmsg(buffers[first : first + BUFFERS_PER_CALL])
        while first < len(buffers) and sent >= len(buffers[first]):
            sent -= len(buffers[first])
            first += 1
        if sent:
            buffers[first] = buffers[first][sent:]
