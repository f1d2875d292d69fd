"""Processes that write into a region of the test's process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from pdserve_kv_transfer.connectors import CONNECTORS
from pdserve_kv_transfer.digest import block_digest
from pdserve_kv_transfer.errors import TransferError
from pdserve_protocol.handoff import Region

from support.movers import cache_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from pdserve_kv_transfer.connector import SourceConnector

WAIT_S = 10.0


def write_from_another_process(pipe: Connection, connector: str) -> None:
    """Fills the region, tells the digests by slot, and when told so writes on until it fails."""
    name, num_slots, slot_bytes, metadata = pipe.recv()
    cache = cache_of(num_slots, slot_bytes, seed=5)
    source = CONNECTORS[connector].source(cache)
    source.connect("d", Region(name=name, num_slots=num_slots, slot_bytes=slot_bytes, metadata=metadata))
    _write(source, num_slots)
    pipe.send({slot: block_digest(cache[slot]) for slot in range(num_slots)})
    pipe.recv()
    pipe.send(_write_on(source, num_slots))
    source.close()


def push_until_it_fails(pipe: Connection, connector: str) -> None:
    """Fills the region with ones, again and again."""
    name, num_slots, slot_bytes, metadata = pipe.recv()
    source = CONNECTORS[connector].source(np.ones((num_slots, slot_bytes), dtype=np.uint8))
    source.connect("d", Region(name=name, num_slots=num_slots, slot_bytes=slot_bytes, metadata=metadata))
    pipe.send(_write_on(source, num_slots))
    source.close()


def _write_on(source: SourceConnector, num_slots: int) -> str:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            _write(source, num_slots)
        except TransferError:
            return "failed"
    return "never failed"


def _write(source: SourceConnector, num_slots: int) -> None:
    handle = source.write("d", [(slot, slot) for slot in range(num_slots)])
    deadline = time.monotonic() + WAIT_S
    while not source.poll(handle):
        if time.monotonic() > deadline:
            raise TimeoutError
