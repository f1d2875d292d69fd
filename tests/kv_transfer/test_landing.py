"""The memory of a landing zone."""

from __future__ import annotations

from pdserve_kv_transfer.landing import LandingZone


def test_an_abandoned_zone_gives_its_memory_back() -> None:
    zone = LandingZone(4, 4096)
    zone.memory_SB[:] = 7
    zone.abandon()
    # The addresses are still there, and what is read there now are fresh pages: the old ones are gone.
    assert not zone.memory_SB.any()
