"""A process that writes into a region of the test's process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

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
    deadline = time.monotonic() + WAIT_S
    outcome = "never failed"
    while outcome != "failed" and time.monotonic() < deadline:
        try:
            _write(source, num_slots)
        except TransferError:
            outcome = "failed"
    pipe.send(outcome)
    source.close()


def _write(source: SourceConnector, num_slots: int) -> None:
    handle = source.write("d", [(slot, slot) for slot in range(num_slots)])
    deadline = time.monotonic() + WAIT_S
    while not source.poll(handle):
        if time.monotonic() > deadline:
            raise TimeoutError
