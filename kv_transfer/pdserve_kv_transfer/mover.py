"""The mover: one thread that owns the connectors, writes blocks out and takes landed blocks in.

It is told what to do through a queue and answers with events. It sleeps when no write is under way and polls only while
one is. It knows cache blocks, slots and bytes; which of them belong together is the state machines' business.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pdserve_protocol.handoff import Region

from pdserve_kv_transfer.connectors import CONNECTORS
from pdserve_kv_transfer.digest import block_digest
from pdserve_kv_transfer.errors import ConnectorMissing, RegionTooSmall, TransferError
from pdserve_kv_transfer.events import (
    Connected,
    ConnectFailed,
    Landed,
    MoverDied,
    MoverEvent,
    RegionFailed,
    RegionOpened,
    WriteFailed,
    Written,
)
from pdserve_kv_transfer.landing import LandingZone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from pdserve_kv_transfer.connector import Connector, SourceConnector, TargetConnector

DEFAULT_REGION_BYTES = 64 << 20
MIN_SLOTS = 4
POLL_MIN_S = 20e-6
POLL_MAX_S = 1e-3
PREPARE_S = 30.0
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A write under way."""

    connector: str
    handle: int
    peer: str
    id: str
    digests: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class _OpenRegion:
    name: str
    connector: str
    zone: LandingZone


class Mover:
    """Commands return at once; each is carried out in order and answered by ``post(event)`` on the mover's thread.

    ``cache_NB`` is the engine's KV cache as bytes, uint8 [num_blocks, block_bytes], contiguous. ``peer`` is an opaque
    key: fresh for each connection, and the same for a region until it is fenced.
    """

    def __init__(
        self,
        cache_NB: npt.NDArray[np.uint8],
        post: Callable[[MoverEvent], None],
        *,
        connectors: Mapping[str, Connector] | None = None,
        region_bytes: int = DEFAULT_REGION_BYTES,
    ) -> None:
        block_bytes = int(cache_NB.shape[1])
        self._num_slots = region_bytes // block_bytes
        if self._num_slots < MIN_SLOTS:
            raise RegionTooSmall(region_bytes, block_bytes, MIN_SLOTS)
        self._cache_NB = cache_NB
        self._block_bytes = block_bytes
        self._scratch_B = np.empty(block_bytes, dtype=np.uint8)
        self._post = post
        self._connectors = CONNECTORS if connectors is None else connectors
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sources: dict[str, SourceConnector] = {}
        self._targets: dict[str, TargetConnector] = {}
        self._connections: dict[str, str] = {}
        self._regions: dict[str, _OpenRegion] = {}
        self._fenced: list[LandingZone] = []
        self._flights: deque[_Flight] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    # Commands.

    def prepare(self, connector: str) -> None:
        """Makes the source half and waits for it, so that no connection has to, and that it is known to work.

        Raises:
            ConnectorMissing: it cannot be made, or not in time.
        """
        made: Future[None] = Future()
        self._commands.put(lambda: self._do_prepare(connector, made))
        try:
            made.result(PREPARE_S)
        except TimeoutError as error:
            raise ConnectorMissing(connector, f"not ready within {PREPARE_S:g} s") from error

    def open_region(self, peer: str, connector: str) -> None:
        """Answered by RegionOpened or RegionFailed."""
        self._commands.put(lambda: self._do_open_region(peer, connector))

    def fence(self, peer: str) -> None:
        """Makes the peer's region unreachable, if there is one."""
        self._commands.put(lambda: self._do_fence(peer))

    def connect(self, peer: str, connector: str, region: Region) -> None:
        """Answered by Connected or ConnectFailed."""
        self._commands.put(lambda: self._do_connect(peer, connector, region))

    def disconnect(self, peer: str) -> None:
        """Gives up the peer's writes under way, each answered by WriteFailed, and forgets the peer."""
        self._commands.put(lambda: self._do_disconnect(peer))

    def write(self, peer: str, id: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        """(position, block, slot) each; answered by one Written or WriteFailed. Until then the blocks must stay."""
        self._commands.put(lambda: self._do_write(peer, id, pieces))

    def land(self, peer: str, id: str, pieces: Sequence[tuple[int, int, int, bytes]]) -> None:
        """(position, slot, block, digest) each; answered by one Landed."""
        self._commands.put(lambda: self._do_land(peer, id, pieces))

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Fences all regions, releases the connectors and ends the thread; False if it has not ended in time."""
        self._commands.put(self._do_close)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._step()
            self._release_all()
        except BaseException as error:
            self._post(MoverDied(error))

    def _step(self) -> None:
        """One command, then one look at each write under way, with longer pauses the longer nothing happens."""
        command = self._commands.get()
        command()
        pause_s = POLL_MIN_S
        while self._flights and not self._closing:
            if self._poll_flights():
                pause_s = POLL_MIN_S
                continue
            try:
                command = self._commands.get(timeout=pause_s)
            except queue.Empty:
                pause_s = min(2 * pause_s, POLL_MAX_S)
                continue
            command()

    def _poll_flights(self) -> bool:
        any_ended = False
        for _ in range(len(self._flights)):
            flight = self._flights.popleft()
            try:
                ended = self._sources[flight.connector].poll(flight.handle)
            except TransferError as error:
                self._post(WriteFailed(flight.peer, flight.id, frozenset(flight.digests), str(error)))
                any_ended = True
                continue
            if not ended:
                self._flights.append(flight)
                continue
            self._post(Written(flight.peer, flight.id, flight.digests))
            any_ended = True
        return any_ended

    def _source(self, name: str) -> SourceConnector:
        if name not in self._sources:
            self._sources[name] = self._connector(name).source(self._cache_NB)
        return self._sources[name]

    def _target(self, name: str) -> TargetConnector:
        if name not in self._targets:
            self._targets[name] = self._connector(name).target()
        return self._targets[name]

    def _connector(self, name: str) -> Connector:
        connector = self._connectors.get(name)
        if connector is None:
            raise ConnectorMissing(name, f"there are {sorted(self._connectors)}")
        return connector

    def _do_prepare(self, connector: str, made: Future[None]) -> None:
        try:
            self._source(connector)
        except TransferError as error:
            made.set_exception(error)
        else:
            made.set_result(None)

    def _do_open_region(self, peer: str, connector: str) -> None:
        zone = LandingZone(self._num_slots, self._block_bytes)
        name = f"region-{uuid.uuid4().hex}"
        try:
            metadata = self._target(connector).open_region(name, zone.memory_SB)
        except TransferError as error:
            self._post(RegionFailed(peer, str(error)))
            return
        self._do_fence(peer)
        self._regions[peer] = _OpenRegion(name, connector, zone)
        region = Region(name=name, num_slots=zone.num_slots, slot_bytes=zone.slot_bytes, metadata=metadata)
        self._post(RegionOpened(peer, region))

    def _do_fence(self, peer: str) -> None:
        region = self._regions.pop(peer, None)
        if region is None:
            return
        self._targets[region.connector].fence(region.name)
        region.zone.abandon()
        self._fenced.append(region.zone)

    def _do_connect(self, peer: str, connector: str, region: Region) -> None:
        try:
            self._source(connector).connect(peer, region)
        except TransferError as error:
            self._post(ConnectFailed(peer, str(error)))
            return
        self._connections[peer] = connector
        self._post(Connected(peer))

    def _do_disconnect(self, peer: str) -> None:
        connector = self._connections.pop(peer, None)
        if connector is None:
            return
        source = self._sources[connector]
        kept: deque[_Flight] = deque()
        for flight in self._flights:
            if flight.peer != peer:
                kept.append(flight)
                continue
            source.abandon(flight.handle)
            self._post(WriteFailed(peer, flight.id, frozenset(flight.digests), "disconnected"))
        self._flights = kept
        source.disconnect(peer)

    def _do_write(self, peer: str, id: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        connector = self._connections.get(peer)
        if connector is None:
            self._post(WriteFailed(peer, id, frozenset(piece[0] for piece in pieces), "not connected"))
            return
        # Before the write: whatever happens to the block meanwhile shows as a mismatch at the receiver.
        digests = {position: block_digest(self._cache_NB[block]) for position, block, _ in pieces}
        try:
            handle = self._sources[connector].write(peer, [(block, slot) for _, block, slot in pieces])
        except TransferError as error:
            self._post(WriteFailed(peer, id, frozenset(digests), str(error)))
            return
        self._flights.append(_Flight(connector, handle, peer, id, digests))

    def _do_land(self, peer: str, id: str, pieces: Sequence[tuple[int, int, int, bytes]]) -> None:
        region = self._regions.get(peer)
        ok: set[int] = set()
        bad: set[int] = set()
        for position, slot, block, digest in pieces:
            verified = region is not None and region.zone.land(slot, digest, self._cache_NB[block], self._scratch_B)
            (ok if verified else bad).add(position)
        self._post(Landed(peer, id, frozenset(ok), frozenset(bad), len(ok) * self._block_bytes))

    def _do_close(self) -> None:
        self._closing = True

    def _release_all(self) -> None:
        for peer in list(self._connections):
            self._do_disconnect(peer)
        for peer in list(self._regions):
            self._do_fence(peer)
        for source in self._sources.values():
            source.close()
        for target in self._targets.values():
            target.close()
