"""The mover with real connectors: bytes arrive, wrong ones are found, a fence holds."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest
from pdserve_kv_transfer.connector import Connector, SourceConnector
from pdserve_kv_transfer.connectors import CONNECTORS
from pdserve_kv_transfer.digest import block_digest
from pdserve_kv_transfer.errors import ConnectorMissing, RegionTooSmall
from pdserve_kv_transfer.events import (
    Connected,
    ConnectFailed,
    Landed,
    MoverDied,
    RegionFailed,
    RegionOpened,
    WriteFailed,
    Written,
)
from pdserve_kv_transfer.mover import POPULATE_SHARE, Mover
from pdserve_kv_transfer.pages import LARGE_PAGE_BYTES
from pdserve_kv_transfer.slow import slow
from pdserve_kv_transfer.wire import agree
from pdserve_protocol.node import KVLayout
from support.handoff_world import identity
from support.movers import NUM_BLOCKS, WAIT_S, Inbox, cache_of, mover_pair

BLOCK_BYTES = 8192
LAYOUT = KVLayout(block_size=16, num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32", block_bytes=BLOCK_BYTES)


@pytest.fixture(params=["loopback", pytest.param("nixl", marks=pytest.mark.slow)])
def connector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_bytes_arrive_in_the_blocks_of_their_positions(connector: str) -> None:
    with mover_pair(connector, BLOCK_BYTES) as pair:
        pair.connect()
        # Positions 0, 16, 32, 48: blocks and slots in no order, some of them neighbours.
        pair.sender.write("d", "r1", [(0, 5, 2), (16, 6, 3), (32, 1, 0), (48, 9, 1)])
        written = pair.sent.expect(Written)
        assert written.digests == {p: block_digest(pair.source[b]) for p, b in [(0, 5), (16, 6), (32, 1), (48, 9)]}
        blocks = {0: 7, 16: 3, 32: 2, 48: 8}
        slots = {0: 2, 16: 3, 32: 0, 48: 1}
        pair.receiver.land("p", "r1", [(p, slots[p], blocks[p], written.digests[p]) for p in blocks])
        landed = pair.received.expect(Landed)
        assert (landed.ok, landed.bad) == (frozenset(blocks), frozenset())
        for position, block in [(0, 5), (16, 6), (32, 1), (48, 9)]:
            assert np.array_equal(pair.target[blocks[position]], pair.source[block])
        untouched = set(range(len(pair.target))) - set(blocks.values())
        assert not pair.target[sorted(untouched)].any()


def test_a_corrupt_block_is_bad_and_never_reaches_the_cache(connector: str) -> None:
    with mover_pair(connector, BLOCK_BYTES) as pair:
        pair.connect()
        pair.sender.write("d", "r1", [(0, 1, 0), (16, 2, 1)])
        digests = pair.sent.expect(Written).digests
        # What was sent for position 16 is claimed for position 0 too.
        pair.receiver.land("p", "r1", [(0, 1, 4, digests[0]), (16, 1, 5, digests[16])])
        landed = pair.received.expect(Landed)
        assert (landed.ok, landed.bad) == (frozenset({16}), frozenset({0}))
        assert not pair.target[4].any()


def test_after_a_fence_nothing_lands_and_a_new_region_works(connector: str) -> None:
    with mover_pair(connector, BLOCK_BYTES) as pair:
        old = pair.connect()
        pair.receiver.fence("p")
        # A source may need a moment to notice; until then its bytes go to addresses that nobody uses any more.
        outcome: object = None
        deadline = time.monotonic() + WAIT_S
        while not isinstance(outcome, WriteFailed) and time.monotonic() < deadline:
            pair.sender.write("d", "r1", [(0, 1, 0)])
            outcome = pair.sent.next()
        assert isinstance(outcome, WriteFailed)
        assert outcome.positions == {0}
        pair.receiver.land("p", "r1", [(0, 0, 4, block_digest(pair.source[1]))])
        assert pair.received.expect(Landed).bad == {0}
        pair.sender.disconnect("d")
        new = pair.connect(key="d2")
        assert new.name != old.name
        pair.sender.write("d2", "r2", [(0, 1, 0)])
        digests = pair.sent.expect(Written).digests
        pair.receiver.land("p", "r2", [(0, 0, 4, digests[0])])
        assert pair.received.expect(Landed).ok == {0}
        assert np.array_equal(pair.target[4], pair.source[1])


def test_regions_of_two_peers_are_apart(connector: str) -> None:
    with mover_pair(connector, BLOCK_BYTES) as pair:
        first = pair.connect()
        second = pair.connect(peer="p2", key="d2")
        assert first.name != second.name
        pair.receiver.fence("p")
        # Carried out in order: the first region is fenced when this is answered.
        pair.receiver.land("p", "r0", [(0, 0, 4, b"")])
        assert pair.received.expect(Landed).bad == {0}
        pair.sender.write("d2", "r1", [(0, 3, 0)])
        digests = pair.sent.expect(Written).digests
        pair.receiver.land("p2", "r1", [(0, 0, 4, digests[0])])
        assert pair.received.expect(Landed).ok == {0}


def test_foreign_metadata_is_refused_not_used(connector: str) -> None:
    with mover_pair(connector, BLOCK_BYTES) as pair:
        region = pair.open_region()
        for metadata in (b"", b"garbage", b"\x92\xc4\x03abc\x01"):
            broken = type(region)(name="x", num_slots=4, slot_bytes=BLOCK_BYTES, metadata=metadata)
            pair.sender.connect("bad", connector, broken)
            pair.sent.expect(ConnectFailed)


def test_an_unknown_connector_is_told_by_name() -> None:
    with mover_pair("loopback", BLOCK_BYTES) as pair:
        pair.receiver.open_region("p", "carrier-pigeon")
        assert "carrier-pigeon" in pair.received.expect(RegionFailed).reason


def test_a_connector_that_cannot_be_made_is_told_at_once() -> None:
    def no_device(cache_NB: object) -> SourceConnector:
        raise ConnectorMissing("loopback", "no device")

    broken = {"loopback": Connector(source=no_device, target=CONNECTORS["loopback"].target)}
    with mover_pair("loopback", BLOCK_BYTES, connectors=broken) as pair:
        with pytest.raises(ConnectorMissing, match="no device"):
            pair.sender.prepare("loopback")
        pair.sender.connect("d", "loopback", pair.open_region())
        assert "no device" in pair.sent.expect(ConnectFailed).reason


def test_disconnect_gives_up_a_write_that_is_held_back() -> None:
    gate = threading.Event()
    held = {"loopback": slow(CONNECTORS["loopback"], gate=gate.is_set)}
    with mover_pair("loopback", BLOCK_BYTES, connectors=held) as pair:
        pair.connect()
        pair.sender.write("d", "r1", [(0, 1, 0), (16, 2, 1)])
        pair.sender.disconnect("d")
        failed = pair.sent.expect(WriteFailed)
        assert (failed.id, failed.positions) == ("r1", {0, 16})


def test_a_held_write_ends_when_the_gate_opens() -> None:
    gate = threading.Event()
    held = {"loopback": slow(CONNECTORS["loopback"], gate=gate.is_set)}
    with mover_pair("loopback", BLOCK_BYTES, connectors=held) as pair:
        pair.connect()
        pair.sender.write("d", "r1", [(0, 1, 0)])
        # A command is carried out while the write is under way.
        pair.sender.write("nobody", "r2", [(0, 1, 0)])
        assert pair.sent.expect(WriteFailed).id == "r2"
        gate.set()
        assert pair.sent.expect(Written).id == "r1"


def test_a_fault_of_the_thread_is_an_event() -> None:
    inbox = Inbox()
    mover = Mover(cache_of(4, BLOCK_BYTES), inbox.put, region_bytes=4 * BLOCK_BYTES)
    mover.open_region("p", "loopback")
    inbox.expect(RegionOpened)
    mover.land("p", "r1", [(0, 99, 0, b"")])
    died = inbox.expect(MoverDied)
    assert isinstance(died.error, IndexError)
    assert mover.close()


def test_a_region_must_hold_a_few_blocks() -> None:
    with pytest.raises(RegionTooSmall):
        Mover(cache_of(4, BLOCK_BYTES), lambda event: None, region_bytes=3 * BLOCK_BYTES)


def test_no_memory_for_a_region_fails_that_region_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with mover_pair("loopback", BLOCK_BYTES) as pair:

        def no_memory(*arguments: object, **flags: object) -> object:
            raise OSError(12, "Cannot allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr("pdserve_kv_transfer.pages.mmap.mmap", no_memory)
            pair.receiver.open_region("p", "loopback")
            assert "Cannot allocate memory" in pair.received.expect(RegionFailed).reason
        pair.connect()


def test_close_twice_and_with_a_write_under_way() -> None:
    held = {"loopback": slow(CONNECTORS["loopback"], gate=lambda: False)}
    with mover_pair("loopback", BLOCK_BYTES, connectors=held) as pair:
        pair.connect()
        pair.sender.write("d", "r1", [(0, 1, 0)])
        assert pair.sender.close()
        pair.sent.expect(WriteFailed)
        assert pair.sender.close()


@pytest.mark.slow
def test_idle_agents_take_next_to_no_cpu() -> None:
    with mover_pair("nixl", BLOCK_BYTES) as pair:
        pair.connect()
        pair.sender.write("d", "r1", [(0, 1, 0)])
        pair.sent.expect(Written)
        before = time.process_time()
        # The interval over which CPU time is measured, not a wait for something.
        with pytest.raises(queue.Empty):
            pair.sent.next(timeout_s=1.0)
        assert time.process_time() - before < 0.02


def test_more_is_written_than_staging_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve_kv_transfer.staging.STAGING_BYTES", 0)
    monkeypatch.setattr("pdserve_kv_transfer.staging.MIN_ROWS", 2)
    nodes = identity("p", layout=LAYOUT, kv_encrypt=True), identity("d", layout=LAYOUT, kv_encrypt=True)
    gate = threading.Event()
    held = {"loopback": slow(CONNECTORS["loopback"], gate=gate.is_set)}
    with mover_pair("loopback", BLOCK_BYTES, connectors=held, wire=agree(*nodes), secret="key") as pair:
        pair.connect()
        pair.sender.write("d", "r1", [(0, 5, 2), (16, 6, 3), (32, 1, 0)])
        pair.sender.write("d", "r2", [(0, 7, 1)])
        gate.set()
        tags: dict[tuple[str, int], bytes] = {}
        while len(tags) < 4:
            written = pair.sent.expect(Written)
            tags.update({(written.id, position): tag for position, tag in written.digests.items()})
        pair.receiver.land(
            "p", "r1", [(0, 2, 7, tags["r1", 0]), (16, 3, 3, tags["r1", 16]), (32, 0, 2, tags["r1", 32])]
        )
        assert pair.received.expect(Landed).ok == {0, 16, 32}
        pair.receiver.land("p", "r2", [(0, 1, 9, tags["r1", 0])])
        assert pair.received.expect(Landed).bad == {0}
        pair.receiver.land("p", "r2", [(0, 1, 9, tags["r2", 0])])
        assert pair.received.expect(Landed).ok == {0}
        assert np.array_equal(pair.target[[7, 3, 2, 9]], pair.source[[5, 6, 1, 7]])


def test_receivers_have_staging_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve_kv_transfer.staging.STAGING_BYTES", 0)
    monkeypatch.setattr("pdserve_kv_transfer.staging.MIN_ROWS", 2)
    gate = threading.Event()
    nodes = identity("p", layout=LAYOUT, kv_encrypt=True), identity("d", layout=LAYOUT, kv_encrypt=True)
    held = {"loopback": slow(CONNECTORS["loopback"], gate=gate.is_set)}
    with mover_pair("loopback", BLOCK_BYTES, connectors=held, wire=agree(*nodes), secret="key") as pair:
        pair.connect()
        pair.connect(peer="p2", key="d2")
        for number in range(8):
            pair.sender.write("d", f"r{number}", [(0, number, number % 4)])
        pair.sender.write("d2", "other", [(0, 1, 0)])
        # Answered when all of these are known.
        pair.sender.write("nobody", "last", [(0, 1, 0)])
        pair.sent.expect(WriteFailed)
        gate.set()
        order = [pair.sent.expect(Written).peer for _ in range(9)]
        # Two writes of the first had the staging before the other one came, and one takes a turn beside it.
        assert "d2" in order[:4], order


def test_a_disconnect_answers_what_waits_for_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve_kv_transfer.staging.STAGING_BYTES", 0)
    monkeypatch.setattr("pdserve_kv_transfer.staging.MIN_ROWS", 1)
    nodes = identity("p", layout=LAYOUT, kv_wire_dtype="int8"), identity("d", layout=LAYOUT, kv_wire_dtype="int8")
    gate = threading.Event()
    held = {"loopback": slow(CONNECTORS["loopback"], gate=gate.is_set)}
    with mover_pair("loopback", BLOCK_BYTES, connectors=held, wire=agree(*nodes)) as pair:
        pair.connect()
        pair.connect(peer="p2", key="d2")
        pair.sender.write("d", "r1", [(0, 5, 2), (16, 6, 3)])
        pair.sender.write("d2", "r2", [(0, 1, 0)])
        pair.sender.disconnect("d")
        failed = {p for _ in range(2) for p in pair.sent.expect(WriteFailed).positions}
        assert failed == {0, 16}
        gate.set()
        # The staging of what was given up serves the other peer.
        assert pair.sent.expect(Written).id == "r2"


@pytest.mark.parametrize("wire_dtype", ["auto", "int8"])
def test_a_sealed_wire_over_every_connector(connector: str, wire_dtype: str) -> None:
    common = {"kv_encrypt": True, "kv_wire_dtype": wire_dtype}
    wire = agree(identity("p", layout=LAYOUT, **common), identity("d", layout=LAYOUT, **common))
    with mover_pair(connector, BLOCK_BYTES, wire=wire, secret="key") as pair:
        pair.connect()
        pair.sender.write("d", "r1", [(0, 5, 2)])
        tags = pair.sent.expect(Written).digests
        pair.receiver.land("p", "r1", [(0, 2, 7, tags[0])])
        landed = pair.received.expect(Landed)
        assert (landed.ok, landed.num_bytes) == ({0}, wire.slot_bytes)
        assert pair.target[7].any()
        if wire_dtype == "auto":
            assert np.array_equal(pair.target[7], pair.source[5])


def test_abandoned_regions_are_counted() -> None:
    with mover_pair("loopback", BLOCK_BYTES) as pair:
        region = pair.open_region()
        pair.receiver.fence("p")
        pair.receiver.open_region("p2", "carrier-pigeon")
        pair.received.expect(RegionFailed)
        assert pair.receiver.regions_abandoned == 1
        assert pair.receiver.bytes_abandoned == region.num_slots * region.slot_bytes


def test_connected_before_any_write() -> None:
    with mover_pair("loopback", BLOCK_BYTES) as pair:
        region = pair.open_region()
        pair.sender.connect("d", "loopback", region)
        assert pair.sent.expect(Connected).peer == "d"


def test_memory_is_found_bit_by_bit_beside_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's blocks in one go would take the core of those who decode for a tenth of a second and more."""
    found: list[int] = []
    all_found = threading.Event()
    began = time.perf_counter()

    def find(memory: np.ndarray) -> None:
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass
        found.append(memory.ctypes.data)
        if len(found) == NUM_BLOCKS:
            all_found.set()

    monkeypatch.setattr("pdserve_kv_transfer.mover.populate", find)
    with mover_pair("loopback", BLOCK_BYTES) as pair:
        pair.receiver.populate(range(NUM_BLOCKS))
        pair.receiver.populate(range(NUM_BLOCKS))
        pair.connect()
        assert len(found) < NUM_BLOCKS, "another command waited for all of it"
        assert all_found.wait(WAIT_S)
        assert time.perf_counter() - began >= 0.001 * (NUM_BLOCKS - 1) / POPULATE_SHARE
    assert found[:NUM_BLOCKS] == [memory.ctypes.data for memory in pair.target], "each once"


def test_an_open_region_gets_its_memory_and_a_fenced_one_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = LARGE_PAGE_BYTES * 5 // 8
    pieces = [LARGE_PAGE_BYTES, LARGE_PAGE_BYTES, LARGE_PAGE_BYTES // 2]
    found: Inbox = Inbox()
    goes_on = threading.Semaphore(0)

    def find(memory: np.ndarray) -> None:
        found.put(memory.nbytes)
        assert goes_on.acquire(timeout=WAIT_S)

    monkeypatch.setattr("pdserve_kv_transfer.mover.populate", find)
    with mover_pair("loopback", block_bytes) as pair:
        pair.open_region("p1")
        assert found.next() == pieces[0]
        pair.receiver.fence("p1")
        pair.receiver.open_region("p2", "loopback")
        goes_on.release(1 + len(pieces))
        assert [found.next() for _ in pieces] == pieces, "all of the second, no more of the first"
