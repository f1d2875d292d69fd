"""The memory of a landing zone."""

from __future__ import annotations

import tracemalloc

from pdserve_kv_transfer.landing import LandingZone


def test_an_abandoned_zone_gives_its_memory_back() -> None:
    zone = LandingZone(4, 4096)
    zone.memory_SB[:] = 7
    zone.abandon()
    # The addresses are still there, and what is read there now are fresh pages: the old ones are gone.
    assert not zone.memory_SB.any()


def test_an_abandoned_zone_costs_addresses_only() -> None:
    tracemalloc.start()
    try:
        zones = [LandingZone(4, 1 << 20) for _ in range(8)]
        for zone in zones:
            zone.abandon()
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
