"""What every connector keeps, whatever carries the bytes."""

from __future__ import annotations

import multiprocessing
import time
import uuid
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pdserve_kv_transfer.connector import Connector, Network
from pdserve_kv_transfer.connectors import CONNECTORS
from pdserve_kv_transfer.digest import block_digest
from pdserve_kv_transfer.errors import RegionUnreachable, RegionUnusable, TransferError
from pdserve_kv_transfer.faults import Faults
from pdserve_kv_transfer.faulty import faulty
from pdserve_kv_transfer.landing import LandingZone
from pdserve_kv_transfer.tcp import tcp_connector
from pdserve_protocol.handoff import Region
from support.docs import code_of
from support.movers import cache_of
from support.region_writer import write_from_another_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve_kv_transfer.connector import SourceConnector, TargetConnector

BLOCK_BYTES = 4096
NUM_SLOTS = 8
WAIT_S = 20.0


KINDS = ["loopback", "tcp", "tcp with a key", "faulty", "of the docs", pytest.param("nixl", marks=pytest.mark.slow)]


@pytest.fixture(params=KINDS)
def connector(request: pytest.FixtureRequest) -> Connector:
    match request.param:
        case "tcp with a key":
            return tcp_connector(Network(cluster_key="secret"))
        case "faulty":
            return faulty(CONNECTORS["tcp"], Faults())
        case "of the docs":
            example = code_of("kv-connectors.md")["unix_connector"]
            made = example(Network())
            assert isinstance(made, Connector)
            return made
        case name:
            return CONNECTORS[name]


class Ends:
    """Both halves, a cache of random blocks, and regions that stay reserved as the contract asks."""

    def __init__(self, connector: Connector) -> None:
        self.cache = cache_of(32, BLOCK_BYTES, seed=3)
        self.source: SourceConnector = connector.source(self.cache)
        self.target: TargetConnector = connector.target()
        self.zones: list[LandingZone] = []

    def open(self) -> tuple[Region, LandingZone]:
        zone = LandingZone(NUM_SLOTS, BLOCK_BYTES)
        self.zones.append(zone)
        name = f"region-{uuid.uuid4().hex}"
        metadata = self.target.open_region(name, zone.memory_SB)
        return Region(name=name, num_slots=NUM_SLOTS, slot_bytes=BLOCK_BYTES, metadata=metadata), zone

    def write(self, peer: str, pieces: list[tuple[int, int]]) -> None:
        handle = self.source.write(peer, pieces)
        deadline = time.monotonic() + WAIT_S
        while not self.source.poll(handle):
            assert time.monotonic() < deadline

    def write_on(self, peer: str, pieces: list[tuple[int, int]]) -> None:
        """Writes again and again until it fails."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            self.write(peer, pieces)


@pytest.fixture
def ends(connector: Connector) -> Iterator[Ends]:
    ends = Ends(connector)
    yield ends
    ends.source.close()
    ends.target.close()


def test_each_block_lies_in_its_slot_when_polled_to_the_end(ends: Ends) -> None:
    region, zone = ends.open()
    ends.source.connect("d", region)
    pieces = [(4, 0), (5, 1), (6, 2), (20, 7), (19, 6), (0, 4)]
    ends.write("d", pieces)
    for block, slot in pieces:
        assert np.array_equal(zone.memory_SB[slot], ends.cache[block])
    assert not zone.memory_SB[[3, 5]].any()


def test_many_writes_under_way_at_once(ends: Ends) -> None:
    region, zone = ends.open()
    ends.source.connect("d", region)
    handles = {ends.source.write("d", [(slot + 8, slot)]) for slot in range(NUM_SLOTS)}
    deadline = time.monotonic() + WAIT_S
    while handles:
        handles -= {handle for handle in handles if ends.source.poll(handle)}
        assert time.monotonic() < deadline
    assert np.array_equal(zone.memory_SB, ends.cache[8 : 8 + NUM_SLOTS])


def test_two_regions_are_apart(ends: Ends) -> None:
    (first, first_zone), (second, second_zone) = ends.open(), ends.open()
    ends.source.connect("d1", first)
    ends.source.connect("d2", second)
    ends.write("d2", [(3, 0)])
    assert not first_zone.memory_SB.any()
    assert np.array_equal(second_zone.memory_SB[0], ends.cache[3])


def test_after_a_fence_writes_fail_and_reach_nothing_new(ends: Ends) -> None:
    region, zone = ends.open()
    ends.source.connect("d", region)
    ends.write("d", [(1, 0)])
    ends.target.fence(region.name)
    zone.abandon()
    _, successor = ends.open()
    with pytest.raises(TransferError):
        ends.write_on("d", [(2, 0)])
    assert not successor.memory_SB.any()


def test_a_fence_leaves_other_regions_alone(ends: Ends) -> None:
    (first, _), (second, zone) = ends.open(), ends.open()
    ends.source.connect("d2", second)
    ends.target.fence(first.name)
    ends.write("d2", [(1, 0)])
    assert np.array_equal(zone.memory_SB[0], ends.cache[1])


def test_an_unknown_peer_is_an_error_of_ours(ends: Ends) -> None:
    with pytest.raises(RegionUnreachable):
        ends.source.write("nobody", [(0, 0)])
    ends.source.disconnect("nobody")


def test_metadata_of_another_connector_is_refused(ends: Ends) -> None:
    for metadata in (b"", b"garbage", b"\x92\xc4\x03abc\x01", b"\0" * 4000):
        with pytest.raises((RegionUnusable, RegionUnreachable)):
            ends.source.connect("d", Region(name="x", num_slots=1, slot_bytes=BLOCK_BYTES, metadata=metadata))


def test_a_region_that_is_fenced_is_not_connected_to(ends: Ends) -> None:
    region, zone = ends.open()
    ends.target.fence(region.name)
    ends.target.fence(region.name)

    def connect_and_write() -> None:
        ends.source.connect("d", region)
        ends.write_on("d", [(1, 0)])

    with pytest.raises(TransferError):
        connect_and_write()
    assert not zone.memory_SB.any()


def test_a_disconnected_peer_is_not_written(ends: Ends) -> None:
    region, _ = ends.open()
    ends.source.connect("d", region)
    ends.write("d", [(1, 0)])
    ends.source.disconnect("d")
    with pytest.raises(RegionUnreachable):
        ends.source.write("d", [(1, 0)])


def test_close_is_idempotent(ends: Ends) -> None:
    region, _ = ends.open()
    ends.source.connect("d", region)
    for _ in range(2):
        ends.source.close()
        ends.target.close()


@pytest.mark.slow
@pytest.mark.parametrize(("connector", "transports"), [("nixl", "all"), ("nixl", "tcp"), ("tcp", "all")])
def test_between_two_processes(connector: str, transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=write_from_another_process, args=(theirs, connector))
    process.start()
    target = CONNECTORS[connector].target()
    zone = LandingZone(NUM_SLOTS, BLOCK_BYTES)
    try:
        name = f"region-{uuid.uuid4().hex}"
        metadata = target.open_region(name, zone.memory_SB)
        ours.send((name, NUM_SLOTS, BLOCK_BYTES, metadata))
        assert ours.poll(WAIT_S), "the writer is silent"
        digests = ours.recv()
        # Done at the source means there at the target; nobody polled here.
        assert digests
        assert all(block_digest(zone.memory_SB[slot]) == digest for slot, digest in digests.items())
        target.fence(name)
        zone.abandon()
        successor = LandingZone(NUM_SLOTS, BLOCK_BYTES)
        target.open_region(f"region-{uuid.uuid4().hex}", successor.memory_SB)
        ours.send("again")
        assert ours.poll(WAIT_S), "the writer is silent"
        assert ours.recv() == "failed"
        assert not successor.memory_SB.any()
    finally:
        target.close()
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
