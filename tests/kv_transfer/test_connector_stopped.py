"""A sender that is stopped in the middle of a push, and goes on when its memory is others'."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pdserve_kv_transfer.connectors import CONNECTORS
from pdserve_kv_transfer.landing import LandingZone
from pdserve_protocol.handoff import Region
from support.movers import cache_of
from support.region_writer import push_until_it_fails

if TYPE_CHECKING:
    from pdserve_kv_transfer.connector import SourceConnector, TargetConnector

NUM_SLOTS = 16
SLOT_BYTES = 1 << 20
WAIT_S = 20.0
ALL = [(slot, slot) for slot in range(NUM_SLOTS)]

pytestmark = pytest.mark.slow


def write(source: SourceConnector) -> None:
    handle = source.write("d", ALL)
    deadline = time.monotonic() + WAIT_S
    while not source.poll(handle):
        assert time.monotonic() < deadline


def open_region(target: TargetConnector, zone: LandingZone) -> Region:
    name = f"region-{uuid.uuid4().hex}"
    metadata = target.open_region(name, zone.memory_SB)
    return Region(name=name, num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES, metadata=metadata)


@pytest.mark.parametrize(("connector", "transports"), [("nixl", "all"), ("nixl", "tcp"), ("tcp", "all")])
def test_a_stopped_sender(connector: str, transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=push_until_it_fails, args=(theirs, connector))
    process.start()
    target = CONNECTORS[connector].target()
    cache = cache_of(NUM_SLOTS, SLOT_BYTES, seed=8)
    other = CONNECTORS[connector].source(cache)
    zone = LandingZone(NUM_SLOTS, SLOT_BYTES)
    try:
        region = open_region(target, zone)
        ours.send((region.name, NUM_SLOTS, SLOT_BYTES, region.metadata))
        deadline = time.monotonic() + WAIT_S
        while not zone.memory_SB.any():
            assert time.monotonic() < deadline
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            target.fence(region.name)
            zone.abandon()
            # With tcp even the same memory is safe; NIXL keeps the old addresses reserved, so it is another.
            next_zone = zone if connector == "tcp" else LandingZone(NUM_SLOTS, SLOT_BYTES)
            successor = open_region(target, next_zone)
            other.connect("d", successor)
            write(other)
            assert np.array_equal(next_zone.memory_SB, cache)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert ours.poll(WAIT_S), "the sender is silent"
        assert ours.recv() == "failed"
        assert np.array_equal(next_zone.memory_SB, cache)
        write(other)
    finally:
        other.close()
        target.close()
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
