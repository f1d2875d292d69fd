"""The NIXL connector. Nothing else in the project knows NIXL, and its errors end here.

A node has one source agent: the KV cache is registered with it, its metadata never leaves the process, and it runs no
progress thread because its writes are polled. Each landing region has a target agent of its own with that region alone;
its progress thread makes bytes arrive while nobody polls. The only way to fence a region is to destroy its agent:
removing the peer, deregistering the memory and releasing handles all let later writes through.
"""

from __future__ import annotations

import importlib.util
import os
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from pdserve_kv_transfer.connector import MAX_SLOTS, Connector
from pdserve_kv_transfer.errors import ConnectorMissing, RegionUnreachable, RegionUnusable, WriteFault
from pdserve_kv_transfer.ucx import configure_ucx

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import numpy.typing as npt
    from pdserve_protocol.handoff import Region

    from pdserve_kv_transfer.connector import Network

PROGRESS_INTERVAL_US = 20_000
"""Of a target agent's progress thread. Traffic wakes it at once, so this costs no latency; 0 would spin a whole core,
1 ms takes 3 % of one, 20 ms 0.4 %."""


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """What a source needs: the agent's own metadata and where the region lies in the target's memory."""

    agent: bytes
    address: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


def _load() -> ModuleType:
    try:
        from nixl_cu12 import _bindings  # type: ignore[attr-defined]
    except ImportError as error:
        raise ConnectorMissing("nixl", f"{error}; install the nixl-cu12 package") from error
    bindings: ModuleType = _bindings
    return bindings


def _errors(bindings: ModuleType) -> tuple[type[Exception], ...]:
    return tuple(
        getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")
    )


def _make_agent(bindings: ModuleType, name: str, *, progress: bool) -> Any:
    config = bindings.nixlAgentConfig()
    config.useProgThread = progress
    config.pthrDelay = PROGRESS_INTERVAL_US
    config.useListenThread = False
    config.captureTelemetry = False
    agent = bindings.nixlAgent(name, config)
    agent.createBackend("UCX", {})
    return agent


def _devices() -> str:
    return f"UCX_NET_DEVICES={os.environ.get('UCX_NET_DEVICES', 'all')}"


def _registration(bindings: ModuleType, memory: npt.NDArray[np.uint8]) -> Any:
    return bindings.nixlRegDList(bindings.DRAM_SEG, [(memory.ctypes.data, memory.nbytes, 0, "")])


def _rows(bindings: ModuleType, address: int, count: int, size: int) -> Any:
    """Descriptors of ``count`` rows from ``address`` on."""
    rows = np.zeros((count, 3), dtype=np.uint64)
    rows[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(size)
    rows[:, 1] = size
    return bindings.nixlXferDList(bindings.DRAM_SEG, rows)


class _Peer(msgspec.Struct, frozen=True):
    """``slots``: its prepared descriptors."""

    agent: str
    slots: int
    region: str


class NixlSource:
    """Writes blocks of the cache through one agent.

    The descriptors of all blocks, and of all slots of a region, are prepared once: a write names them by number, and
    NIXL joins neighbours.
    """

    def __init__(self, cache_NB: npt.NDArray[np.uint8]) -> None:
        self._nixl = _load()
        self._errors = _errors(self._nixl)
        self._cache_NB = cache_NB
        try:
            self._agent = _make_agent(self._nixl, f"source-{uuid.uuid4().hex}", progress=False)
            self._registered = _registration(self._nixl, cache_NB)
            self._agent.registerMem(self._registered, [])
            blocks = _rows(self._nixl, cache_NB.ctypes.data, *cache_NB.shape)
            self._blocks = self._agent.prepXferDlist("", blocks)
        except self._errors as error:
            raise ConnectorMissing("nixl", f"no source agent over {_devices()}: {error}") from error
        self._peers: dict[str, _Peer] = {}
        self._handles: dict[int, str] = {}
        self._abandoned: list[int] = []

    def connect(self, peer: str, region: Region) -> None:
        try:
            metadata = msgspec.msgpack.decode(region.metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise RegionUnusable(region.name, f"it is not of the nixl connector: {error}") from error
        if not 0 < region.num_slots <= MAX_SLOTS:
            raise RegionUnusable(region.name, f"it has {region.num_slots} slots")
        name, slots = "", None
        try:
            agent = self._agent.loadRemoteMD(metadata.agent)
            name = agent.decode() if isinstance(agent, bytes) else str(agent)
            # Slots first: from a connection that is begun and dropped at once, UCX may take parts for the next one's.
            rows = _rows(self._nixl, metadata.address, region.num_slots, int(self._cache_NB.shape[1]))
            slots = self._agent.prepXferDlist(name, rows)
            self._agent.makeConnection(name, [])
        except self._nixl.nixlRemoteDisconnectError as error:
            self._forget(name, slots)
            raise RegionUnreachable(region.name, str(error)) from error
        except UnicodeDecodeError as error:
            raise RegionUnusable(region.name, "the name of its agent is none") from error
        except self._errors as error:
            self._forget(name, slots)
            raise RegionUnusable(region.name, str(error)) from error
        self._peers[peer] = _Peer(name, slots, region.name)

    def write(self, peer: str, pieces: Sequence[tuple[int, int]]) -> int:
        target = self._peers.get(peer)
        if target is None:
            raise RegionUnreachable(peer, "it is not connected")
        blocks, slots = zip(*sorted(pieces), strict=True)
        try:
            handle = self._agent.makeXferReq(
                self._nixl.NIXL_WRITE, self._blocks, blocks, target.slots, slots, "", [], False
            )
        except self._errors as error:
            raise WriteFault(str(error)) from error
        self._handles[handle] = target.region
        try:
            self._agent.postXferReq(handle)
        except self._errors as error:
            raise self._ended_badly(handle, error) from error
        return int(handle)

    def poll(self, handle: int) -> bool:
        try:
            status = self._agent.getXferStatus(handle)
        except self._errors as error:
            raise self._ended_badly(handle, error) from error
        if status == self._nixl.NIXL_IN_PROG:
            return False
        if status != self._nixl.NIXL_SUCCESS:
            raise self._ended_badly(handle, status)
        self._release(handle)
        return True

    def abandon(self, handle: int) -> None:
        if handle in self._handles:
            self._release(handle)

    def disconnect(self, peer: str) -> None:
        target = self._peers.pop(peer, None)
        if target is None:
            return
        self._retry_releases()
        self._forget(target.agent, target.slots)

    def _forget(self, agent: str, slots: int | None) -> None:
        if slots is not None:
            self._agent.releasedDlistH(slots)
        try:
            self._agent.invalidateRemoteMD(agent)
        except self._nixl.nixlNotFoundError:
            # It was never known, or NIXL itself forgot it when it saw it disconnect.
            return

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        for handle in list(self._handles):
            self.abandon(handle)
        self._retry_releases()
        self._agent = None

    def _ended_badly(self, handle: int, cause: object) -> RegionUnreachable | WriteFault:
        region = self._handles[handle]
        self._release(handle)
        if isinstance(cause, self._nixl.nixlRemoteDisconnectError):
            return RegionUnreachable(region, str(cause))
        return WriteFault(str(cause))

    def _release(self, handle: int) -> None:
        """NIXL refuses to release a handle that it cannot stop yet; such a one is tried again later."""
        self._handles.pop(handle, None)
        try:
            self._agent.releaseXferReq(handle)
        except self._errors:
            self._abandoned.append(handle)

    def _retry_releases(self) -> None:
        abandoned, self._abandoned = self._abandoned, []
        for handle in abandoned:
            self._release(handle)


class NixlTarget:
    """One agent per region."""

    def __init__(self) -> None:
        self._nixl = _load()
        self._errors = _errors(self._nixl)
        self._agents: dict[str, Any] = {}

    def open_region(self, name: str, memory_SB: npt.NDArray[np.uint8]) -> bytes:
        try:
            agent = _make_agent(self._nixl, name, progress=True)
            agent.registerMem(_registration(self._nixl, memory_SB), [])
            metadata = _Metadata(agent.getLocalMD(), memory_SB.ctypes.data)
        except self._errors as error:
            raise RegionUnusable(name, str(error)) from error
        self._agents[name] = agent
        return msgspec.msgpack.encode(metadata)

    def fence(self, name: str) -> None:
        # Dropping the last reference destroys the agent: there is no other call for it.
        self._agents.pop(name, None)

    def close(self) -> None:
        self._agents.clear()


def nixl_is_installed() -> bool:
    return importlib.util.find_spec("nixl_cu12") is not None


def nixl_connector(network: Network) -> Connector:
    def source(cache_NB: npt.NDArray[np.uint8]) -> NixlSource:
        configure_ucx(network.host)
        return NixlSource(cache_NB)

    def target() -> NixlTarget:
        configure_ucx(network.host)
        return NixlTarget()

    return Connector(source=source, target=target)
