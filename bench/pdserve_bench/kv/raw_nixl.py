"""NIXL by itself: one registered buffer into another, one descriptor, prepared once, polled without a pause."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
from pdserve_kv_transfer.pages import map_large

if TYPE_CHECKING:
    import numpy.typing as npt

PROGRESS_INTERVAL_US = 20_000


class NixlReceiver:
    """An agent with one buffer. Attributes: ``metadata`` and ``address``, which a sender needs."""

    def __init__(self, num_bytes: int) -> None:
        self._mapping, self._buffer_B = map_large(num_bytes)
        self._buffer_B[:] = 0
        self._agent, _ = _agent(self._buffer_B, progress=True)
        self.metadata: bytes = self._agent.getLocalMD()
        self.address = int(self._buffer_B.ctypes.data)


class NixlSender:
    """Writes the whole buffer."""

    def __init__(self, buffer_B: npt.NDArray[np.uint8], metadata: bytes, address: int) -> None:
        self._buffer_B = buffer_B
        self._agent, self._nixl = _agent(buffer_B, progress=False)
        found = self._agent.loadRemoteMD(metadata)
        remote = found.decode() if isinstance(found, bytes) else str(found)
        self._agent.makeConnection(remote, [])
        local_span, remote_span = (
            self._nixl.nixlXferDList(self._nixl.DRAM_SEG, np.array([(start, buffer_B.nbytes, 0)], dtype=np.uint64))
            for start in (buffer_B.ctypes.data, address)
        )
        self._handle = self._agent.createXferReq(self._nixl.NIXL_WRITE, local_span, remote_span, remote, "")

    def measure(self) -> float:
        """Seconds of one transfer."""
        start = time.perf_counter()
        status = self._agent.postXferReq(self._handle)
        while status == self._nixl.NIXL_IN_PROG:
            status = self._agent.getXferStatus(self._handle)
        return time.perf_counter() - start

    def close(self) -> None:
        self._agent.releaseXferReq(self._handle)
        self._agent = None


def _agent(buffer_B: npt.NDArray[np.uint8], *, progress: bool) -> tuple[Any, Any]:
    from nixl_cu12 import _bindings  # type: ignore[attr-defined]

    nixl: Any = _bindings
    config = nixl.nixlAgentConfig()
    config.useProgThread = progress
    config.pthrDelay = PROGRESS_INTERVAL_US
    config.useListenThread = False
    config.captureTelemetry = False
    agent = nixl.nixlAgent(f"raw-{uuid.uuid4().hex}", config)
    agent.createBackend("UCX", {})
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(buffer_B.ctypes.data, buffer_B.nbytes, 0, "")]), [])
    return agent, nixl
