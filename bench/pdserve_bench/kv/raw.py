"""What connectors are compared with: a copy within memory, and one plain stream of the same bytes."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
from pdserve_kv_transfer.tcp_wire import connect

if TYPE_CHECKING:
    import numpy.typing as npt

WAIT_S = 30.0


class Memcpy:
    """From one buffer into another."""

    def __init__(self, buffer_B: npt.NDArray[np.uint8]) -> None:
        self._from, self._to = buffer_B, np.zeros_like(buffer_B)

    def measure(self) -> float:
        """Seconds of one copy."""
        start = time.perf_counter()
        np.copyto(self._to, self._from)
        return time.perf_counter() - start


class SocketSender:
    """Sends the buffer, and waits until it has been received."""

    def __init__(self, buffer_B: npt.NDArray[np.uint8], host: str, port: int) -> None:
        self._buffer = buffer_B.data
        self._socket = connect(host, port, WAIT_S)
        self._socket.settimeout(None)

    def measure(self) -> float:
        """Seconds from the first byte to the answer."""
        start = time.perf_counter()
        self._socket.sendall(self._buffer)
        if not self._socket.recv(1):
            raise ConnectionError("the receiver has gone")
        return time.perf_counter() - start

    def close(self) -> None:
        self._socket.close()


class SocketReceiver:
    """The other side, for one connection, on a thread of its own."""

    def __init__(self, host: str, num_bytes: int) -> None:
        self._memory = memoryview(bytearray(num_bytes))
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(where[:2], family=family)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        self._listener.close()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv_into(self._memory, 0, socket.MSG_WAITALL) == len(self._memory):
                connection.sendall(b"!")
