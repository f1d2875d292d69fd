"""A closed loop over raw sockets that counts what comes and reads nothing else, so that the router is the limit."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_bench.errors import NothingMeasured

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK = b"data: "
_CHUNKED_END = b"\r\n0\r\n\r\n"
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"
_READ_BYTES = 1 << 18
_SILENT_S = 10.0


@dataclass(slots=True, kw_only=True)
class Counted:
    """What the answers held. ``chunks``: events of streams, those without a token included."""

    requests: int = 0
    chunks: int = 0


class _Connection:
    """One request after the other. ``take`` reads what is there and tells whether the answer is complete."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tail = b""
        self._missing: int | None = None
        self._is_new = True

    def send(self, request: bytes) -> None:
        self._tail, self._missing, self._is_new = b"", None, True
        self.socket.sendall(request)

    def take(self, counted: Counted) -> bool:
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise NothingMeasured({"connection closed": 1})
        if self._is_new:
            self._begin(data)
        if self._missing is not None:
            self._missing -= len(data)
            return self._missing <= 0
        # An event may begin in one read and go on in the next.
        joined = self._tail + data
        counted.chunks += joined.count(_CHUNK)
        self._tail = joined[-len(_CHUNKED_END) :]
        counted.chunks -= self._tail.count(_CHUNK)
        return self._tail == _CHUNKED_END

    def _begin(self, data: bytes) -> None:
        head, found, _ = data.partition(_HEAD_END)
        status = head.partition(b"\r\n")[0]
        if not found or b" 200" not in status:
            raise NothingMeasured({status.decode("latin-1"): 1})
        self._is_new = False
        _, found, length = head.lower().partition(_LENGTH)
        if found:
            self._missing = int(length.partition(b"\r\n")[0]) + len(head) + len(_HEAD_END)


def closed_loop(
    port: int, request: bytes, concurrency: int, seconds: float, on_window: Callable[[Counted], None]
) -> None:
    """Keeps ``concurrency`` requests under way for ``seconds``, then reads what is left.

    Args:
        request: head and body, the same each time.
        on_window: called with what was counted so far when every connection has had an answer, and again at the end of
            ``seconds``.

    Raises:
        NothingMeasured: an answer was no answer.
    """
    counted = Counted()
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        connections = [_Connection(port) for _ in range(concurrency)]
        for connection in connections:
            stack.enter_context(connection.socket)
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send(request)
        busy, cold = set(connections), set(connections)
        ends_at: float | None = None
        while busy:
            ready = selector.select(_SILENT_S)
            if not ready:
                raise NothingMeasured({f"no answer within {_SILENT_S:g} s": len(busy)})
            now = time.monotonic()
            if ends_at is not None and now >= ends_at > 0:
                on_window(counted)
                ends_at = 0.0
            for key, _ in ready:
                connection = key.data
                if not connection.take(counted):
                    continue
                counted.requests += 1
                cold.discard(connection)
                if not cold and ends_at is None:
                    on_window(counted)
                    ends_at = time.monotonic() + seconds
                if ends_at is None or ends_at > now:
                    connection.send(request)
                else:
                    busy.discard(connection)
                    selector.unregister(connection.socket)
