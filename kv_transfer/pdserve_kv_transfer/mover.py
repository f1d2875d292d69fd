"""The mover: one thread that owns the connectors, writes blocks out and takes landed blocks in.

It is told what to do through a queue and answers with events. It sleeps when there is nothing to do and polls only
while a write is under way. It knows cache blocks and slots; what lies in them is the codec's business, and which of
them belong together is the state machines'.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from pdserve_protocol.handoff import Region
from pdserve_protocol.inbox import Inbox

from pdserve_kv_transfer.codec import Lander, Packer, slot_bytes_of
from pdserve_kv_transfer.connector import MAX_SLOTS
from pdserve_kv_transfer.connectors import CONNECTORS
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
from pdserve_kv_transfer.pages import LARGE_PAGE_BYTES, populate
from pdserve_kv_transfer.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve_kv_transfer.cache_memory import Bytes, Cache
    from pdserve_kv_transfer.connector import Connector, SourceConnector, TargetConnector
    from pdserve_kv_transfer.spans import CopyRun
    from pdserve_kv_transfer.wire import Wire

DEFAULT_REGION_BYTES = 64 << 20
MIN_SLOTS = 4
POLL_MIN_S = 20e-6
POLL_MAX_S = 1e-3
POLL_SHARE = 1 / 16
"""Of the time since something happened: how long the next pause is. An end is noticed so much later at most."""
POPULATE_SHARE = 1 / 8
"""Of its core's time, at most, that goes into memory which is needed soon: requests decode on that core."""
PREPARE_S = 30.0
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A write under way. ``tags``: position -> tag; ``rows`` of the staging that it reads."""

    handle: int
    peer: str
    id: str
    tags: Mapping[int, bytes]
    rows: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Connection:
    """Where writes to a peer come from. ``waiting``: (id, position, block, slot) for which there is no staging yet."""

    source: SourceConnector
    packer: Packer
    staging: Staging | None
    waiting: deque[tuple[str, int, int, int]] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class _OpenRegion:
    peer: str
    name: str
    connector: str
    zone: LandingZone
    lander: Lander


class Mover:
    """Commands return at once; each is carried out in order and answered by ``post(event)`` on the mover's thread.

    ``cache_NB`` is the engine's KV cache as bytes, uint8 [num_blocks, block_bytes], contiguous, or on a device, where
    blocks travel by way of staging. ``peer`` is an opaque key: fresh for each connection, and the same for a region
    until it is fenced. ``secret`` is the cluster key.

    Attributes:
        regions_abandoned, bytes_abandoned: fenced regions, whose addresses stay reserved.
    """

    def __init__(
        self,
        cache_NB: Cache,
        post: Callable[[MoverEvent], None],
        *,
        connectors: Mapping[str, Connector] | None = None,
        region_bytes: int = DEFAULT_REGION_BYTES,
        secret: str | None = None,
    ) -> None:
        self._region_bytes = region_bytes
        self._cache_NB = cache_NB
        self._populated = bytearray(cache_NB.shape[0])
        self._to_populate: deque[tuple[_OpenRegion | None, Bytes]] = deque()
        self._populate_at = 0.0
        self._quiet_since = 0.0
        self._slots_of(None)
        self._secret = secret
        self.regions_abandoned = 0
        self.bytes_abandoned = 0
        self._post = post
        self._connectors = CONNECTORS if connectors is None else connectors
        self._commands: Inbox[Callable[[], None]] = Inbox()
        self._sources: dict[str, SourceConnector] = {}
        self._targets: dict[str, TargetConnector] = {}
        self._stagings: dict[tuple[str, int], Staging] = {}
        self._connections: dict[str, _Connection] = {}
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

    def open_region(self, peer: str, connector: str, wire: Wire | None = None) -> None:
        """Answered by RegionOpened or RegionFailed. Without a wire blocks travel as they are in both caches."""
        self._commands.put(lambda: self._do_open_region(peer, connector, wire))

    def fence(self, peer: str) -> None:
        """Makes the peer's region unreachable, if there is one."""
        self._commands.put(lambda: self._do_fence(peer))

    def connect(self, peer: str, connector: str, region: Region, wire: Wire | None = None) -> None:
        """Answered by Connected or ConnectFailed."""
        self._commands.put(lambda: self._do_connect(peer, connector, region, wire))

    def disconnect(self, peer: str) -> None:
        """Gives up the peer's writes under way, each answered by WriteFailed, and forgets the peer."""
        self._commands.put(lambda: self._do_disconnect(peer))

    def write(self, peer: str, id: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        """(position, block, slot) each; each answered once, in a Written or a WriteFailed. Until then it must stay."""
        self._commands.put(lambda: self._do_write(peer, id, pieces))

    def land(self, peer: str, id: str, pieces: Sequence[tuple[int, int, int | Sequence[CopyRun], bytes]]) -> None:
        """(position, slot, block or runs of its tokens, tag) each; answered by one Landed."""
        self._commands.put(lambda: self._do_land(peer, id, pieces))

    def populate(self, blocks: Sequence[int]) -> None:
        """Blocks of the cache are about to be landed in: what their memory still has to cost, it costs before."""
        self._commands.put(lambda: self._do_populate(blocks))

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
        """A command, if one comes in time; a look at each write under way; some memory, if it is time for that."""
        try:
            command = self._commands.get(timeout=self._pause_s())
        except queue.Empty:
            pass
        else:
            command()
        if self._flights and self._poll_flights():
            self._quiet_since = time.perf_counter()
        if self._to_populate and time.perf_counter() >= self._populate_at:
            self._populate_next()

    def _pause_s(self) -> float | None:
        """How long there may be nothing but commands: longer the longer nothing happens to the writes under way."""
        now = time.perf_counter()
        pauses_s = []
        if self._flights:
            pauses_s.append(min(max((now - self._quiet_since) * POLL_SHARE, POLL_MIN_S), POLL_MAX_S))
        if self._to_populate:
            pauses_s.append(max(self._populate_at - now, 0.0))
        return min(pauses_s, default=None)

    def _poll_flights(self) -> bool:
        any_ended = False
        for _ in range(len(self._flights)):
            flight = self._flights.popleft()
            try:
                if not self._connections[flight.peer].source.poll(flight.handle):
                    self._flights.append(flight)
                    continue
                self._post(Written(flight.peer, flight.id, flight.tags))
            except TransferError as error:
                self._post(WriteFailed(flight.peer, flight.id, frozenset(flight.tags), str(error)))
            any_ended = True
            self._give_back(flight)
        return any_ended

    def _source(self, name: str) -> SourceConnector:
        """Over the cache itself, or over staging where the cache is out of the connector's reach."""
        if not isinstance(self._cache_NB, np.ndarray):
            return self._staging(name, slot_bytes_of(self._cache_NB, None)).source
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

    def _staging(self, connector: str, row_bytes: int) -> Staging:
        key = (connector, row_bytes)
        if key not in self._stagings:
            staging = Staging(row_bytes, self._connector(connector).source)
            if not isinstance(self._cache_NB, np.ndarray):
                self._cache_NB.pin(staging.memory_SB)
            self._stagings[key] = staging
        return self._stagings[key]

    def _slots_of(self, wire: Wire | None) -> int:
        slot_bytes = slot_bytes_of(self._cache_NB, wire)
        num_slots = self._region_bytes // slot_bytes
        if num_slots < MIN_SLOTS:
            raise RegionTooSmall(self._region_bytes, slot_bytes, MIN_SLOTS)
        return min(num_slots, MAX_SLOTS)

    def _do_open_region(self, peer: str, connector: str, wire: Wire | None) -> None:
        name = f"region-{uuid.uuid4().hex}"
        try:
            num_slots = self._slots_of(wire)
            lander = Lander(self._cache_NB, wire, name, self._secret)
            zone = LandingZone(num_slots, lander.slot_bytes)
            metadata = self._target(connector).open_region(name, zone.memory_SB)
        except TransferError as error:
            self._post(RegionFailed(peer, str(error)))
            return
        self._do_fence(peer)
        self._regions[peer] = _OpenRegion(peer, name, connector, zone, lander)
        zone_B = zone.memory_SB.reshape(-1)
        self._to_populate.extend(
            (self._regions[peer], zone_B[start : start + LARGE_PAGE_BYTES])
            for start in range(0, zone_B.nbytes, LARGE_PAGE_BYTES)
        )
        region = Region(name=name, num_slots=zone.num_slots, slot_bytes=zone.slot_bytes, metadata=metadata)
        self._post(RegionOpened(peer, region))

    def _do_fence(self, peer: str) -> None:
        region = self._regions.pop(peer, None)
        if region is None:
            return
        self._targets[region.connector].fence(region.name)
        region.zone.abandon()
        self._fenced.append(region.zone)
        self.regions_abandoned += 1
        self.bytes_abandoned += region.zone.num_bytes

    def _do_connect(self, peer: str, connector: str, region: Region, wire: Wire | None) -> None:
        try:
            packer = Packer(self._cache_NB, wire, region.name, self._secret)
            staging = self._staging(connector, packer.slot_bytes) if packer.is_staged else None
            source = staging.source if staging is not None else self._source(connector)
            reached = source.connect(peer, region)
        except TransferError as error:
            self._post(ConnectFailed(peer, str(error)))
            return
        connection = self._connections[peer] = _Connection(source, packer, staging)
        if reached is None:
            self._post(Connected(peer))
        else:
            reached.add_done_callback(
                lambda reached: self._commands.put(lambda: self._on_reached(peer, connection, reached))
            )

    def _on_reached(self, peer: str, connection: _Connection, reached: Future[None]) -> None:
        if self._connections.get(peer) is not connection:
            # It has been disconnected meanwhile.
            return
        error = reached.exception()
        if error is None:
            self._post(Connected(peer))
            return
        self._do_disconnect(peer)
        self._post(ConnectFailed(peer, str(error)))

    def _do_disconnect(self, peer: str) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        flights, self._flights = self._flights, deque()
        for flight in flights:
            if flight.peer != peer:
                self._flights.append(flight)
                continue
            connection.source.abandon(flight.handle)
            self._post(WriteFailed(peer, flight.id, frozenset(flight.tags), "disconnected"))
            self._give_back(flight, goes_on=False)
        for id, position, _, _ in connection.waiting:
            self._post(WriteFailed(peer, id, frozenset({position}), "disconnected"))
        del self._connections[peer]
        connection.source.disconnect(peer)
        self._write_waiting()

    def _do_write(self, peer: str, id: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            self._post(WriteFailed(peer, id, frozenset(piece[0] for piece in pieces), "not connected"))
            return
        if connection.staging is not None:
            connection.waiting.extend((id, *piece) for piece in pieces)
            self._write_waiting()
            return
        tags = {position: connection.packer.pack(block, id, position, None) for position, block, _ in pieces}
        self._start(connection, peer, id, tags, [(block, slot) for _, block, slot in pieces])

    def _write_waiting(self) -> None:
        """Packs and writes what waits for staging, as far as there is any: a request's of each peer in turn."""
        turns = deque(self._connections)
        while turns:
            peer = turns.popleft()
            connection = self._connections[peer]
            if connection.staging is None or not connection.waiting or not connection.staging.num_free:
                continue
            self._write_staged(peer, connection, connection.staging)
            # Also when more staging is free, later: whoever had some is the last to have more.
            self._connections[peer] = self._connections.pop(peer)
            turns.append(peer)

    def _write_staged(self, peer: str, connection: _Connection, staging: Staging) -> None:
        """What waits of the first request, or as much of it as there is staging for."""
        id = connection.waiting[0][0]
        tags: dict[int, bytes] = {}
        pieces: list[tuple[int, int]] = []
        while staging.num_free and connection.waiting and connection.waiting[0][0] == id:
            _, position, block, slot = connection.waiting.popleft()
            row = staging.take()
            try:
                tags[position] = connection.packer.pack(block, id, position, staging.memory_SB[row])
            except TransferError as error:
                staging.give_back([row])
                self._post(WriteFailed(peer, id, frozenset({position}), str(error)))
                continue
            pieces.append((row, slot))
        if pieces:
            self._start(connection, peer, id, tags, pieces, [row for row, _ in pieces])

    def _start(
        self,
        connection: _Connection,
        peer: str,
        id: str,
        tags: Mapping[int, bytes],
        pieces: Sequence[tuple[int, int]],
        rows: Sequence[int] = (),
    ) -> None:
        try:
            handle = connection.source.write(peer, pieces)
        except TransferError as error:
            self._post(WriteFailed(peer, id, frozenset(tags), str(error)))
            if connection.staging is not None:
                connection.staging.give_back(rows)
            return
        if not self._flights:
            self._quiet_since = time.perf_counter()
        self._flights.append(_Flight(handle, peer, id, tags, rows))

    def _give_back(self, flight: _Flight, *, goes_on: bool = True) -> None:
        """Frees the staging of a write that has ended."""
        staging = self._connections[flight.peer].staging
        if staging is not None:
            staging.give_back(flight.rows)
            if goes_on:
                self._write_waiting()

    def _do_land(self, peer: str, id: str, pieces: Sequence[tuple[int, int, int | Sequence[CopyRun], bytes]]) -> None:
        region = self._regions.get(peer)
        began = time.perf_counter()
        ok: set[int] = set()
        bad: set[int] = set()
        for position, slot, target, tag in pieces:
            verified = region is not None and region.lander.land(region.zone.memory_SB[slot], tag, id, position, target)
            (ok if verified else bad).add(position)
        num_bytes = len(ok) * region.zone.slot_bytes if region is not None else 0
        self._post(Landed(peer, id, frozenset(ok), frozenset(bad), num_bytes, time.perf_counter() - began))

    def _do_populate(self, blocks: Sequence[int]) -> None:
        cache_NB = self._cache_NB
        if isinstance(cache_NB, np.ndarray):
            new = [block for block in blocks if not self._populated[block]]
            self._to_populate.extend((None, cache_NB[block]) for block in new)
            for block in new:
                self._populated[block] = 1

    def _populate_next(self) -> None:
        """A piece a time: a whole prompt's in one go would hold up the steps of those who decode meanwhile."""
        began = time.perf_counter()
        region, memory = self._to_populate.popleft()
        # One that has been fenced has given its pages back.
        if region is None or self._regions.get(region.peer) is region:
            populate(memory)
        now = time.perf_counter()
        self._populate_at = now + (now - began) * (1 / POPULATE_SHARE - 1)

    def _do_close(self) -> None:
        self._closing = True

    def _release_all(self) -> None:
        for peer in list(self._connections):
            self._do_disconnect(peer)
        for peer in list(self._regions):
            self._do_fence(peer)
        for source in [*self._sources.values(), *(staging.source for staging in self._stagings.values())]:
            source.close()
        for target in self._targets.values():
            target.close()
